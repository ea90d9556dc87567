"""The API: its numbers are those of the library; what it says of itself; how it ends."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import pytest
import torch
from fastapi import Query, Request, Response
from PIL import Image
from serving import MODEL, SECOND, ask, explained, image, images_of, message, small_model, values_model, with_client

import vitkit
from vitkit.data.decode import decode
from vitkit.data.preprocess import prepare, to_tensor
from vitkit.explanation.attention import output_attention, query_attention
from vitkit.explanation.distance import attention_distance
from vitkit.explanation.relevance import class_relevance
from vitkit.model.base import Outputs
from vitkit.web import api
from vitkit.web.api import Route
from vitkit.web.app import create_app
from vitkit.web.models import load_served
from vitkit.web.settings import ServeSettings

# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_predictions_are_the_models(kind: str) -> None:
    data = image(kind=kind)
    answer = ask("POST", "/api/v1/predict?top=3", content=data)
    assert answer.status_code == 200, answer.text
    with torch.no_grad():
        wanted = MODEL.model(images_of(MODEL, data)).softmax(-1)[0]
    (one,) = answer.json()["predictions"]
    assert [rank["class"] for rank in one["classes"]] == wanted.argsort(descending=True)[:3].tolist()
    for rank in one["classes"]:  # the answer has six digits
        assert rank["probability"] == pytest.approx(float(wanted[rank["class"]]), rel=1e-5)
        assert rank["name"] == f"kind {rank['class']}"


def test_several_images_of_a_form_keep_their_order_and_names() -> None:
    images = [image(seed=i, size=(40 + i, 30)) for i in range(5)]
    files = [("any", (f"{i}.png", data, "image/png")) for i, data in enumerate(images)]
    answer = ask("POST", "/api/predict", files=files).json()["predictions"]
    assert [one["file"] for one in answer] == [f"{i}.png" for i in range(5)]
    for data, one in zip(images, answer, strict=True):
        with torch.no_grad():
            wanted = int(MODEL.model(images_of(MODEL, data)).argmax())
        assert one["classes"][0]["class"] == wanted


def test_the_image_that_comes_back_is_what_the_model_saw() -> None:
    data = image(size=(90, 50))
    one = ask("POST", "/api/predict?image=true", content=data).json()["predictions"][0]
    seen = base64.b64decode(one["picture"].split(",")[1])
    pixels = np.asarray(Image.open(io.BytesIO(seen)))
    wanted = to_tensor(prepare(decode(data), MODEL.model.config.preprocessing)).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels, wanted)
    again = ask("POST", "/api/predict?prepared=true", content=seen).json()["predictions"][0]
    assert again["classes"] == one["classes"]


def test_attention_is_the_librarys() -> None:
    images = images_of(MODEL, image())
    whole = output_attention(MODEL.model, images)
    got = explained("method=attention&layer=all&head=all").json()
    assert got["axes"] == ["layer", "head", "row", "column"]
    np.testing.assert_allclose(got["values"], whole.raw[0], rtol=1e-4)
    got = explained("layer=1&head=mean").json()
    np.testing.assert_allclose(got["values"], whole.raw[0, 1].mean(0), rtol=1e-4)
    patch = query_attention(MODEL.model, images, (2, 3))[0]
    got = explained("layer=-2&head=1&query=2,3").json()
    np.testing.assert_allclose(got["values"], patch[1, 1], rtol=1e-4)
    every = np.load(io.BytesIO(explained("layer=all&head=all&query=all&format=npy").content))
    assert every.shape == (3, 2, 4, 4, 4, 4)
    np.testing.assert_allclose(every[:, :, 2, 3], patch, rtol=1e-4)


def test_rollout_is_the_librarys_at_the_last_layer() -> None:
    whole = output_attention(MODEL.model, images_of(MODEL, image())).rollout[0]
    np.testing.assert_allclose(explained("method=rollout").json()["values"], whole, rtol=1e-4)
    by_layer = explained("method=rollout&layer=all").json()
    assert by_layer["shape"] == [3, 4, 4]
    np.testing.assert_allclose(by_layer["values"][-1], whole, rtol=1e-4)
    rows = np.load(io.BytesIO(explained("method=rollout&query=all&layer=0&format=npy").content))
    one = explained("method=rollout&query=1,2&layer=0").json()["values"]
    np.testing.assert_allclose(rows[1, 2], one, rtol=1e-4)


def test_relevance_and_gradcam_are_the_librarys() -> None:
    found = class_relevance(MODEL.model, images_of(MODEL, image()), torch.tensor([[3, 1]]))
    got = explained("method=relevance&class=kind 3&class=1").json()
    np.testing.assert_allclose(got["values"], found.relevance[0], rtol=1e-3, atol=1e-6)
    assert [c["name"] for c in got["classes"]] == ["kind 3", "kind 1"]
    got = explained("method=gradcam&class=%231").json()
    np.testing.assert_allclose(got["values"], found.gradcam[0, 1], rtol=1e-3, atol=1e-6)


def test_distance_is_the_librarys() -> None:
    reach = attention_distance(MODEL.model, images_of(MODEL, image()))
    got = explained("method=distance").json()
    np.testing.assert_allclose(got["values"], reach.distance[0], rtol=1e-4)
    assert got["uniform_distance"] == pytest.approx(reach.uniform_distance)


def test_a_png_is_the_image_with_the_map_over_it() -> None:
    def drawn(strength: float) -> np.ndarray:
        content = explained(f"method=relevance&format=png&strength={strength}").content
        return np.asarray(Image.open(io.BytesIO(content))).astype(float)

    plain = drawn(0)
    seen = to_tensor(prepare(decode(image()), MODEL.model.config.preprocessing)).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(plain[::7, ::7], seen)  # 32 pixels are drawn as 224
    assert np.abs(drawn(1) - plain).mean() > np.abs(drawn(0.3) - plain).mean() > 3


def test_models_are_chosen_by_name() -> None:
    both = (MODEL, SECOND)
    assert ask("GET", "/api/model", both).json()["models"] == ["small", "other"]
    about = ask("GET", "/api/model?model=other", both).json()
    assert about["grid"] == [2, 4]
    assert about["classes"] == ["kind 0", "kind 1", "kind 2"]
    got = ask("POST", "/api/explain?model=other", both, content=image()).json()
    assert got["shape"] == [2, 4]
    assert "there is small, other" in message(ask("GET", "/api/model?model=third", both), 422, "no_model")


def test_parts_of_the_model() -> None:
    assert ask("GET", "/api/model/filters").json()["shape"] == [28, 8, 8, 3]
    found = ask("GET", "/api/model/positions").json()
    values = np.array(found["values"])
    assert values.shape == (4, 4, 4, 4)
    np.testing.assert_allclose(np.einsum("ijij->ij", values), 1, atol=1e-3)
    assert ask("GET", "/api/model/layers").json()["params"] == sum(p.numel() for p in MODEL.model.parameters())


def test_relative_and_no_positions() -> None:
    relative = small_model("relative", positions="relative")
    assert ask("GET", "/api/model/positions", (relative,)).json()["shows"] == "offsets"
    none = small_model("none", positions="none")
    message(ask("GET", "/api/model/positions", (none,)), 404, "no_positions")


def test_a_class_is_a_name_if_there_is_such_a_name() -> None:
    turned = small_model("turned", classes=10)
    turned.model.class_names = [str(i) for i in range(9, -1, -1)]
    assert [turned.find_output(word) for word in ("3", "#3", "0")] == [6, 3, 9]


def test_a_model_of_values_answers_them_by_name_in_their_units() -> None:
    ages = values_model()
    data = image()
    (one,) = ask("POST", "/api/predict?top=1", (ages,), content=data).json()["predictions"]
    with torch.no_grad():
        raw = ages.model(images_of(ages, data))[0]
    wanted = (raw * torch.tensor([10.0, 2.0]) + torch.tensor([40.0, 170.0])).tolist()
    assert one["classes"] == []
    assert [value["name"] for value in one["values"]] == ["age", "height (cm)"]
    assert [value["value"] for value in one["values"]] == pytest.approx(wanted, rel=1e-5)
    told = ask("GET", "/api/model", (ages,)).json()
    assert told["outputs"] == {"kind": "values", "names": ["age", "height (cm)"]}
    assert told["classes"] == []


def test_what_raises_a_value_can_be_explained() -> None:
    ages = values_model()
    found = class_relevance(ages.model, images_of(ages, image()), torch.tensor([[1, 0]]))
    got = explained("method=relevance&class=height (cm)", models=(ages,)).json()
    np.testing.assert_allclose(got["values"], found.relevance[0, 0], rtol=1e-3, atol=1e-6)
    first = explained("method=gradcam", models=(ages,)).json()
    assert first["classes"] == [{"class": 0, "name": "age"}]
    np.testing.assert_allclose(first["values"], found.gradcam[0, 1], rtol=1e-3, atol=1e-6)
    wrong = ask("POST", "/api/explain?method=relevance&class=weight", (ages,), content=image())
    assert "lists the values" in message(wrong, 422, "no_class")


def test_labels_are_independent() -> None:
    tags = small_model("tags")
    tags.model.outputs = Outputs("labels", tags.model.outputs.names)
    (one,) = ask("POST", "/api/predict", (tags,), content=image()).json()["predictions"]
    with torch.no_grad():
        wanted = tags.model(images_of(tags, image()))[0].sigmoid()
    for rank in one["classes"]:
        assert rank["probability"] == pytest.approx(float(wanted[rank["class"]]), rel=1e-5)


def test_the_older_name_of_a_field_still_works() -> None:
    (one,) = ask("POST", "/api/predict?picture=true", content=image()).json()["predictions"]
    assert one["picture"].startswith("data:image/png")


def test_a_model_without_classes_or_attention() -> None:
    bare = small_model("bare", classes=0)
    assert "no classifier" in message(ask("POST", "/api/predict", (bare,), content=image()), 422, "no_classes")
    seen = ask("POST", "/api/predict?image=true", (bare,), content=image()).json()["predictions"][0]
    assert seen["classes"] == []
    assert seen["picture"].startswith("data:image/png")
    answer = ask("POST", "/api/explain?method=relevance", (bare,), content=image())
    assert "no classifier" in message(answer, 422, "no_classes")
    assert explained("method=attention", models=(bare,)).json()["shape"] == [4, 4]


# --- description, health, metrics --------------------------------------------------------------------


def test_openapi_has_every_route_with_examples() -> None:
    told = ask("GET", "/openapi.json").json()
    assert {"/api/v1/predict", "/api/v1/explain", "/api/v1/model", "/healthz", "/readyz", "/metrics"} <= told[
        "paths"
    ].keys()
    assert not any(path.startswith("/api/") and "/v1/" not in path for path in told["paths"]), "the alias is not listed"
    post = told["paths"]["/api/v1/predict"]["post"]
    assert {"image/jpeg", "multipart/form-data"} <= post["requestBody"]["content"].keys()
    assert {"413", "415", "422", "503"} <= post["responses"].keys()
    assert told["components"]["schemas"]["RankedClass"]["properties"]["probability"]["examples"]


def test_metrics_count_answers_with_bounded_labels() -> None:
    app = create_app((MODEL,), ServeSettings())

    async def visit(client: httpx.AsyncClient) -> str:
        await client.post("/api/predict", content=image())
        await client.post("/api/v1/predict", content=b"nonsense")
        for i in range(20):
            await client.get(f"/nothing/{i}")
        return (await client.get("/metrics")).text

    text = with_client(app, visit)
    assert 'vitkit_requests_total{route="/api/predict",status="200"} 1.0' in text
    assert 'vitkit_requests_total{route="/api/predict",status="415"} 1.0' in text
    assert 'vitkit_requests_total{route="other",status="404"} 20.0' in text
    assert "/nothing" not in text
    assert 'vitkit_batch_size_count{model="small",worker="predict"} 1.0' in text


def test_readiness_ends_when_draining_and_answers_say_close() -> None:
    app = create_app((MODEL,), ServeSettings())

    async def visit(client: httpx.AsyncClient) -> None:
        assert (await client.get("/readyz")).status_code == 200
        app.state.service.draining = True
        answer = await client.get("/readyz")
        assert "shutting down" in message(answer, 503, "not_ready")
        assert answer.headers["retry-after"] == "1"
        predicted = await client.post("/api/predict", content=image())
        assert (predicted.status_code, predicted.headers["connection"]) == (200, "close")

    with_client(app, visit)


def test_a_failing_model_is_a_500_in_words_and_the_server_lives() -> None:
    broken = small_model("broken")
    object.__setattr__(broken, "runtime", Exploding())
    app = create_app((broken,), ServeSettings())

    async def visit(client: httpx.AsyncClient) -> None:
        answer = await client.post("/api/predict", content=image())
        assert message(answer, 500, "failed")
        assert "kaboom" not in answer.text
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/api/explain", content=image())).status_code == 200

    with_client(app, visit)


class Exploding:
    name = "exploding"
    device = torch.device("cpu")

    def run(self, images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("kaboom")


class FakeDevice:
    """A runtime that reads its input elsewhere than the model lies: a batch on any other device cannot be read."""

    name, device = "fake", torch.device("meta")

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def run(self, images: torch.Tensor) -> torch.Tensor:
        assert images.device == self.device, f"a batch on {images.device}"
        return torch.zeros(len(images), self.classes)


def test_a_batch_goes_to_the_device_that_the_runtime_reads() -> None:
    """A model on a GPU whose predictions ONNX computes on the CPU; here the other way round."""
    served = small_model("elsewhere")
    object.__setattr__(served, "runtime", FakeDevice(4))
    (one,) = ask("POST", "/api/predict", (served,), content=image()).json()["predictions"]
    assert [rank["probability"] for rank in one["classes"]] == [0.25] * 4
    assert ask("POST", "/api/explain", (served,), content=image()).status_code == 200  # where the weights are


def test_a_route_is_one_function_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    async def shout(request: Request, word: Annotated[str, Query(description="What to shout.")] = "hi") -> Response:
        return Response(word.upper())

    toy = Route("GET", "/api/v1/shout", shout, "Says it louder")
    monkeypatch.setattr(api, "ROUTES", [*api.ROUTES, toy])
    app = create_app((MODEL,), ServeSettings())

    async def visit(client: httpx.AsyncClient) -> None:
        assert (await client.get("/api/shout?word=cat")).text == "CAT"
        assert "Did you mean word?" in (await client.get("/api/v1/shout?wird=cat")).text
        described = (await client.get("/openapi.json")).json()["paths"]["/api/v1/shout"]["get"]
        assert described["summary"] == "Says it louder"
        assert described["parameters"][0]["description"] == "What to shout."
        assert 'route="/api/shout",status="200"} 1.0' in (await client.get("/metrics")).text

    with_client(app, visit)


def test_weights_that_give_no_number_are_said_to() -> None:
    sick = small_model("sick")
    with torch.no_grad():
        sick.model.head.classifier.bias.fill_(float("nan"))
    answer = ask("POST", "/api/predict", (sick,), content=image())
    assert "finite" in message(answer, 500, "not_finite")


def test_names_from_clients_are_only_repeated() -> None:
    odd = '../../etc/passwd"; \u202e\ud83d\ude00<script>'.encode("utf-16", "surrogatepass").decode("utf-16")
    answer = ask("POST", "/api/predict", files=[("a", (odd, image()))])
    assert answer.status_code == 200
    assert isinstance(json.loads(answer.content)["predictions"][0]["file"], str)


def test_explaining_and_predicting_at_once_do_not_meet() -> None:
    """Looking inside hooks into the model; a prediction that ran through the same hooks would spoil both."""
    app = create_app((MODEL,), ServeSettings())
    images = [image(seed=i) for i in range(4)]

    async def visit(client: httpx.AsyncClient) -> None:
        calm = [(await client.post("/api/explain?method=gradcam&class=1", content=p)).json() for p in images]
        asked = [client.post("/api/explain?method=gradcam&class=1", content=p) for p in images for _ in range(3)]
        others = [client.post("/api/predict", content=images[0]) for _ in range(36)]
        answers = await asyncio.gather(*asked, *others)
        assert [answer.status_code for answer in answers] == [200] * 48
        for i in range(4):
            for busy in answers[3 * i : 3 * i + 3]:
                np.testing.assert_allclose(busy.json()["values"], calm[i]["values"], rtol=1e-5, atol=1e-9)

    with_client(app, visit)
    assert MODEL.vit is not MODEL.model
    assert next(MODEL.vit.parameters()) is next(MODEL.model.parameters())


def test_onnx_is_served_on_a_host_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the default device is a GPU ("meta" stands for it), the model lies where its runtime computes."""
    pytest.importorskip("onnxruntime")
    vitkit.save(MODEL.model, tmp_path / "model.safetensors")
    monkeypatch.setattr("vitkit.runtime.base.resolve_device", lambda wanted=None: torch.device(wanted or "meta"))
    (served,) = load_served([str(tmp_path / "model.safetensors")], ServeSettings(runtime="onnx"))
    assert served.runtime.device == next(served.model.parameters()).device == torch.device("cpu")
    one, same = (ask("POST", "/api/predict", (by,), content=image()).json() for by in (served, MODEL))
    found, wanted = ({c["class"]: c["probability"] for c in by["predictions"][0]["classes"]} for by in (one, same))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert ask("POST", "/api/explain", (served,), content=image()).status_code == 200
