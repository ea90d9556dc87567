"""The Open Inference Protocol with Triton's own client, against a real server; and what is wrong with a request."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from serving import MODEL, ask, image, images_of, live, small_model, values_model
from tritonclient.utils import InferenceServerException

from vitkit.data.decode import decode
from vitkit.web.settings import ServeSettings
from vitkit.web.tensors import LENGTH

SLASHED = small_model("vit-b/16", seed=3)
AGES = values_model()


@pytest.fixture(scope="module")
def client() -> Iterator[triton.InferenceServerClient]:
    with live([MODEL, SLASHED, AGES]) as (address, _):
        yield triton.InferenceServerClient(address.removeprefix("http://"))


def tensor(name: str, values: np.ndarray, kind: str, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), kind)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def wanted(served, *files: bytes) -> np.ndarray:
    with torch.no_grad():
        return served.model(torch.cat([images_of(served, f) for f in files])).softmax(-1).numpy()


def test_health_and_metadata(client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("small")
    assert client.is_model_ready("small", "1")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata("vit-b/16", "1")
    assert about["name"] == "vit-b/16"
    assert about["inputs"][1] == {"name": "pixels", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}
    assert {o["name"]: o["shape"] for o in about["outputs"]} == {
        "probabilities": [-1, 4],
        "logits": [-1, 4],
        "label": [-1],
    }


@pytest.mark.parametrize("model", ["small", "vit-b/16"])
def test_files_pixels_and_prepared_input_are_the_models_own(client, model) -> None:
    served = MODEL if model == "small" else SLASHED
    files = [image(seed=1), image(seed=2)]
    expected = wanted(served, *files)
    raw = np.stack([np.asarray(decode(f, 3)) for f in files])  # N H W C
    ready = torch.cat([images_of(served, f) for f in files]).numpy()
    kinds = [("image", np.array(files, dtype=object), "BYTES"), ("pixels", raw, "UINT8"), ("input", ready, "FP32")]
    for name, values, kind in kinds:
        answer = client.infer(model, [tensor(name, values, kind)], model_version="1", request_id="7")
        np.testing.assert_allclose(answer.as_numpy("probabilities"), expected, rtol=1e-4, atol=1e-6)
        best = [f"kind {i}".encode() for i in expected.argmax(axis=1)]
        assert answer.as_numpy("label").tolist() == best
        assert answer.get_response()["id"] == "7"


def test_outputs_that_are_asked_for_as_json_and_binary(client) -> None:
    sent = [tensor("image", np.array([image()], dtype=object), "BYTES")]
    asked = [triton.InferRequestedOutput("logits", binary_data=b) for b in (True, False)]
    binary, text = (client.infer("small", sent, outputs=[one]) for one in asked)
    np.testing.assert_allclose(binary.as_numpy("logits"), text.as_numpy("logits"), rtol=1e-5)
    assert binary.as_numpy("label") is None
    numbers = client.infer("ages", sent).as_numpy("values")
    assert numbers.shape == (1, 2)


def test_errors_are_sentences_to_the_client(client) -> None:
    with pytest.raises(InferenceServerException, match="is not served here; there is small"):
        client.infer("nobody", [tensor("image", np.array([b"x"], dtype=object), "BYTES")])
    asked = [triton.InferRequestedOutput("boxes")]
    with pytest.raises(InferenceServerException, match="there is no output"):
        client.infer("small", [tensor("image", np.array([image()], dtype=object), "BYTES")], outputs=asked)
    with pytest.raises(InferenceServerException, match="not an image"):
        client.infer("small", [tensor("image", np.array([b"no image"], dtype=object), "BYTES")])
    with pytest.raises(InferenceServerException, match=r"has the version 1 alone"):
        client.get_model_metadata("small", "2")


def test_a_token_is_asked_for_and_counts() -> None:
    with live([MODEL], token="a-long-token") as (address, _):
        client = triton.InferenceServerClient(address.removeprefix("http://"))
        assert client.is_server_ready()  # probes need none
        with pytest.raises(InferenceServerException, match="a token is needed"):
            client.get_model_metadata("small")
        headers = {"Authorization": "Bearer a-long-token"}
        assert client.get_model_metadata("small", headers=headers)["name"] == "small"
        counted = httpx.get(f"{address}/metrics", headers=headers).text
        assert 'route="/v2/models/",status="401"' in counted


def post(content: bytes, length: object = None) -> httpx.Response:
    headers = {} if length is None else {LENGTH: str(length)}
    return ask("POST", "/v2/models/small/infer", content=content, headers=headers)


def request(head: dict, tail: bytes = b"") -> httpx.Response:
    text = json.dumps(head).encode()
    return post(text + tail, len(text) if tail else None)


def one(name: str, kind: str, shape: object, **more: object) -> dict:
    return {"inputs": [{"name": name, "datatype": kind, "shape": shape, **more}]}


def test_base64_in_json() -> None:
    answer = request(one("image", "BYTES", [1], data=[base64.b64encode(image()).decode()])).json()
    assert [o["name"] for o in answer["outputs"]] == ["probabilities", "logits", "label"]
    np.testing.assert_allclose(answer["outputs"][0]["data"], wanted(MODEL, image())[0], rtol=1e-3, atol=1e-5)


SIZE = {"binary_data_size": 8}


@pytest.mark.parametrize(
    ("head", "tail", "words"),
    [
        ({}, b"", "send one input"),
        ({"inputs": [{}, {}]}, b"", "send one input"),
        (one("x", "BYTES", [1]), b"", "there is no input 'x'"),
        (one("image", "FP32", [1]), b"", "datatype BYTES"),
        (one("image", "BYTES", [0]), b"", "above 0"),
        (one("image", "BYTES", ["1"]), b"", "whole numbers"),
        (one("image", "BYTES", [True]), b"", "whole numbers"),
        (one("image", "BYTES", [1]), b"", "neither data nor"),
        (one("image", "BYTES", [1], data=["!"]), b"", "base64"),
        (one("image", "BYTES", [1], data=[[]]), b"", "holds 0 values"),
        (one("image", "BYTES", [2], parameters=SIZE), struct.pack("<I", 4) + b"abcd", "element 1 of 2 is cut short"),
        (one("image", "BYTES", [1], parameters=SIZE), struct.pack("<I", 2**32 - 1) + b"abcd", "cut short"),
        (one("image", "BYTES", [1], parameters=SIZE), struct.pack("<I", 2) + b"abcd", "2 bytes follow the last"),
        (one("image", "BYTES", [1], parameters={"binary_data_size": 9}), b"abcdefgh", "8 bytes follow the JSON"),
        (one("image", "BYTES", [1], parameters={"binary_data_size": -1}), b"abcdefgh", "8 bytes follow"),
        (one("pixels", "UINT8", [1, 1, 3, 3], parameters=SIZE), b"abcdefgh", "takes 9 bytes, and 8 were sent"),
        (one("pixels", "UINT8", [1, 2**30, 2**30, 3], parameters=SIZE), b"abcdefgh", "and 8 were sent"),
        (one("pixels", "UINT8", [1, 1, 1, 3], data=[1, 2, 300]), b"", "from 0 to 255"),
        (one("pixels", "UINT8", [1, 1, 1, 1], data=[1]), b"", r"has the shape \[-1, -1, -1, 3\]"),
        (one("input", "FP32", [1, 3, 8, 8], data=[]), b"", r"has the shape \[-1, 3, 32, 32\]"),
        (one("input", "FP32", [1, 3, 32, 32], data=["a"] * 3072), b"", "must be numbers"),
        (one("input", "FP32", [1, 3, 32, 32], data=[1e300] * 3072), b"", "not finite"),
        ({**one("input", "FP32", [1, 3, 32, 32], data=[0] * 3072), "outputs": 3}, b"", "outputs must be a list"),
    ],
)
def test_damaged_requests_are_400_in_words(head, tail, words) -> None:
    answer = request(head, tail)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(answer.json()["error"])


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "999999999999999999", "3", ""])
def test_a_damaged_length_is_400(length) -> None:
    assert post(b'{"inputs": []}', length).status_code == 400


def test_limits_hold() -> None:
    assert request(one("image", "BYTES", [33], data=["AA=="] * 33)).status_code == 413
    assert post(b"[" * 100_000).status_code == 400
    few = ServeSettings(max_pixels=1000, timeout=300)
    head = json.dumps(one("pixels", "UINT8", [1, 40, 50, 3], parameters={"binary_data_size": 6000})).encode()
    headers = {LENGTH: str(len(head))}
    answer = ask("POST", "/v2/models/small/infer", settings=few, content=head + bytes(6000), headers=headers)
    assert answer.status_code in (413, 422), answer.text  # raw pixels meet the limits of files
    assert "pixels" in answer.json()["error"]
    compressed = ask("POST", "/v2/models/small/infer", content=b"x", headers={"content-encoding": "gzip"})
    assert "without Content-Encoding" in compressed.json()["error"]
