"""The words of the studies in Chinese; the numbers come from the results.

One row for each study: its question, what it varies, the claim with its source, what is compared with what, and some
further pairs of arms. `compare` makes a clause of two names and an interval, as `vitkit.study.numbers.compare` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitkit.study.numbers import Interval

VIT = "Dosovitskiy 等 2021"
VASWANI = "Vaswani 等 2017"


@dataclass(frozen=True)
class Measure:
    """How a difference is put into words."""

    more: str = "高"
    less: str = "低"
    unit: str = "个百分点"
    scale: float = 100


POINTS = Measure()


@dataclass(frozen=True)
class Words:
    question: str
    varies: str
    claim: str
    source: str
    compared: tuple[str, str]
    also: tuple[tuple[str, str, str, str], ...] = ()  # two arms, and what they are called
    measure: Measure = POINTS
    when: str = ""  # before the comparison


def compare(a: str, b: str, gap: Interval, measure: Measure = POINTS) -> str:
    size = f"{measure.scale * abs(gap.mean):.1f} {measure.unit}"
    if not gap.known:
        return f"{a}比{b}{measure.more if gap.mean > 0 else measure.less} {size}（只有一个种子，没有置信区间）"
    low, high = (f"{measure.scale * end:+.1f}" for end in (gap.low, gap.high))
    sure = f"95% 置信区间 {low} 到 {high}，{gap.seeds} 个种子"
    if not gap.covers_zero:
        return f"{a}比{b}{measure.more if gap.mean > 0 else measure.less} {size}（{sure}）"
    if measure is POINTS and gap.alike:
        return f"{a}与{b}相差不到一个百分点（{sure}）"
    return f"{a}与{b}的差别尚无定论（{sure}）"


AGREES = {"agrees": "一致", "contradicts": "不一致", "does not show here": "这里看不到", "open": "尚无定论"}
VERDICT = {
    "agrees": "这与所检验的说法一致。",
    "contradicts": "这与所检验的说法不一致。",
    "does not show here": "所说的差别在这里看不到，并且已经可以排除要看的那么大的差别。",
    "open": "所检验的说法在这里是否成立，尚无定论。",
}
DOUBTS = {"underpowered": "功效不足", "short": "预算用完时训练还在进步"}

WORDS = {
    "data-size": Words(
        "ViT 比 CNN 需要更多数据吗？",
        "乘加次数相同的 ViT、混合模型和 ResNet，以及无标签预训练的 ViT，数据量从 1/32 到全部",
        "数据少时 ViT 落后于 CNN，因为它没有 CNN 的先验（局部性、平移等变性）",
        f"{VIT}，图 3、图 4：900 万张图片时落后，9000 万张起领先",
        ("ViT ", " ResNet "),
        (("ViT, all", "ResNet, all", "用全部图片时，ViT ", " ResNet "),),
        when="只用 1/32 的图片时，",
    ),
    "scaling": Words(
        "更多算力能换来什么？",
        "ViT、混合模型和 ResNet 各三种大小",
        "同样的算力，ViT 比 ResNet 用得更好；模型小时混合模型领先；都没有饱和",
        f"{VIT}，图 5：达到同样的准确率，ViT 的算力是 ResNet 的二分之一到四分之一",
        ("最小的混合模型", "最小的 ViT "),
        (("hybrid, L", "ViT, L", "最大的混合模型", "最大的 ViT "), ("ViT, L", "ViT, S", "最大的 ViT ", "最小的 ViT ")),
    ),
    "shift": Words(
        "图片平移对各类模型有什么影响？",
        "三种模型，测试图片平移",
        "卷积对平移一视同仁，ViT 必须分别学会每个位置",
        f"{VIT}，3.1 节，没有给出数字",
        ("ViT ", " ResNet "),
        (("ViT", "ResNet", "图片不平移时，ViT ", " ResNet "),),
        Measure("多损失", "少损失"),
        "测试图片平移七分之一边长后，",
    ),
    "transfer": Words(
        "在别的类别上预训练有什么好处？该微调哪些权重？",
        "从头训练、微调全部权重、只训练分类头、LoRA、更高分辨率，都只用少量图片",
        "预训练过的模型只需要少量图片；微调全部权重，负担得起就提高分辨率",
        f"{VIT}，表 5：B/16 只用 ImageNet 为 77.9%，先用 ImageNet-21k 预训练为 84.0%",
        ("预训练后微调全部权重", "从头训练"),
        (
            ("head alone", "all weights", "只训练分类头", "微调全部权重"),
            ("all weights, more pixels", "all weights", "提高分辨率", "保持分辨率"),
        ),
    ),
    "self-supervision": Words(
        "标签很少时，预测被遮住的图块有帮助吗？该预测什么？",
        "论文的三种预测目标、MAE、从头训练",
        "遮盖图块预测比不做预训练高 2 个百分点；三种目标差不多，像素略差",
        f"{VIT}，4.6 节与附录 B.1.2：ImageNet 79.9%，比从头训练高 2 个百分点",
        ("先预测图块平均颜色", "从头训练"),
        (("MAE", "from scratch", "先做 MAE ", "从头训练"),),
    ),
    "augmentation-vs-data": Words(
        "数据增强抵得上多少数据？",
        "不增强、轻度、中度，图片取 1/16、1/4 和全部",
        "增强和正则化可以抵得上十倍的图片",
        "Steiner 等 2021（How to train your ViT?）",
        ("轻度增强", "不增强"),
        (
            ("light, all", "none, all", "用全部图片时，轻度增强", "不增强"),
            ("light, 1/16", "none, 1/4", "1/16 的图片加轻度增强", "四倍图片不增强"),
        ),
        when="只用 1/16 的图片时，",
    ),
    "positions": Words(
        "位置编码重要吗？哪一种好？加在哪里？",
        "不用、一维、二维、相对、正余弦、RoPE；加在每一层之前；配合数据增强",
        "不用会变差，各种编码差不多，加在哪里无所谓",
        f"{VIT}，表 8：ImageNet 5-shot，不用 61.4%，一维 64.2%",
        ("不用位置编码", "可学习的一维位置编码"),
        (
            ("2-D learned", "1-D learned", "二维", "一维"),
            ("relative", "1-D learned", "相对", "一维"),
            ("none, augmented", "1-D learned, augmented", "有轻度数据增强时，不用", "一维"),
        ),
    ),
    "positions-by-patch-size": Words(
        "图块越小，位置编码越重要吗？",
        "三种图块大小，有位置编码与没有",
        "图块越小，单个图块说明的内容越少，它的位置就越重要",
        "文章中的推测，没有给出数字",
        ("位置编码在最小的图块上带来的提升", "最大的图块上"),
        measure=Measure("多", "少"),
    ),
    "add-or-concatenate": Words(
        "位置编码为什么是相加而不是拼接？",
        "相加、占四分之一宽度拼接、不用",
        "相加不占用图块的宽度，模型自己能把两者分开，所以拼接更差",
        "文章中的问题，没有给出数字",
        ("拼接", "相加"),
        (("no positions", "added", "不用位置编码", "相加"),),
    ),
    "pooling": Words(
        "分类 token 还是平均池化？",
        "分类 token、平均、MAP，各用各的学习率",
        "两者效果相同，但需要不同的学习率",
        f"{VIT}，图 9：学习率分别为 0.0008（分类 token）和 0.0003（平均）时相同",
        ("平均池化", "分类 token "),
        (("MAP", "class token", "注意力池化 MAP ", "分类 token "),),
        when="各用各的学习率，",
    ),
    "head-type": Words(
        "平均池化真的更差，还是只需要另一个学习率？",
        "分类 token 与平均，各试七个学习率",
        "两者效果相同，但需要不同的学习率",
        f"{VIT}，图 9：学习率分别为 0.0008（分类 token）和 0.0003（平均）时相同",
        ("平均池化", "分类 token "),
        (("mean, 1 x", "class token, 1 x", "都用分类 token 的学习率时，平均池化", "分类 token "),),
        when="各用各的学习率，",
    ),
    "why-a-class-token": Words(
        "为什么要分类 token，而不直接用某个图块的输出？",
        "分类 token：可学习、始终为零、图块看不见它、只在最后一层读取；第一个图块；平均",
        "专用的 token 不属于任何图块，汇集的信息不会与图块自己的信息混在一起",
        f"{VIT}，3.1 节，沿用 BERT，没有给出数字",
        ("用第一个图块的输出", "分类 token "),
        (
            ("fixed class token", "class token", "始终为零、不参与学习的 token ", "可学习的 token "),
            ("mean", "class token", "平均池化", "分类 token "),
            ("unseen class token", "class token", "图块看不见的分类 token ", "图块看得见的"),
            ("class token, last block alone", "class token", "只在最后一层读取的分类 token ", "每层都读取的"),
            ("mean, with a register", "mean", "多加一个不读取的 token 的平均池化", "普通的平均池化"),
        ),
    ),
    "patch-size": Words(
        "token 数量与准确率、开销如何取舍？",
        "宽度固定，四种图块大小",
        "图块越小，token 越多，开销越大，准确率越高",
        f"{VIT}，表 5：ImageNet-21k 预训练后，B/16 比 B/32 高 2.7 个百分点",
        ("最小的图块", "最大的图块"),
    ),
    "patch-embed": Words(
        "图块嵌入用线性层还是卷积？",
        "从相同权重出发的两种写法，以及卷积 stem",
        "线性层与卷积是同一个函数；卷积 stem 更好",
        f"{VIT}，3.1 节；Xiao 等 2021：卷积 stem 高 1 到 2 个百分点",
        ("卷积 stem ", "普通图块嵌入"),
        (("linear map", "convolution", "线性层", "卷积"),),
    ),
    "resolution": Words(
        "用更高分辨率微调有什么收益？位置编码怎样缩放最好？",
        "五种位置编码缩放方法、重新初始化、保持小图、一开始就用大图",
        "微调时像素多于预训练有好处；位置编码按二维缩放",
        f"{VIT}，3.2 节，沿用 Touvron 等 2019：从 224 像素到 384 及以上",
        ("用更多像素微调", "继续用小图"),
        (("official", "fresh positions", "缩放已有的位置编码", "重新学位置编码"),),
    ),
    "registers": Words(
        "寄存器 token 能消除异常长的 token 吗？",
        "没有与四个；token 的长度",
        "大模型训练久了，会把少数图块 token 挪作他用，长度异常；寄存器能替代它们",
        "Darcet 等 2024：约 2% 的 token，长度约为其他的十倍",
        ("有寄存器时最长的 token ", "没有时"),
        (("4 registers", "no register", "准确率方面，有寄存器", "没有寄存器"),),
        Measure("长", "短", "倍中位长度", 1),
    ),
    "attention-bug": Words(
        "`nn.MultiheadAttention` 为什么看上去训练不好？",
        "`batch_first` 取 False 和 True、本项目的实现；只保留 value、key 或 query 的计算图；成批询问与逐张询问",
        "默认的 batch_first=False 让同一批的图片互相看见，逐张询问时模型就失灵；"
        "有文章却归咎于这个模块，以为只保留 key 或 value 的计算图就能治好",
        "一篇入门文章的代码；PyTorch 文档对 batch_first 的说明",
        ("batch_first=False ", " batch_first=True "),
        (
            ("batch_first=False", "batch_first=True", "成批询问时，batch_first=False ", " batch_first=True "),
            ("False, graph of value", "batch_first=False", "成批询问时，所谓治好的写法", "默认写法"),
        ),
        when="逐张询问时，",
    ),
    "scale-in-softmax": Words(
        "缩放写在哪里重要吗？",
        "softmax 之内按头宽、softmax 之后、softmax 之内按模型宽度、不缩放；一个宽头",
        "分数应在 softmax 之内除以头宽的平方根；文章的代码在 softmax 之后除以模型宽度的平方根，应当更差",
        f"入门文章的代码；{VASWANI}，公式 1",
        ("在 softmax 之后缩放", "正确的写法"),
        (
            ("softmax(qk) v", "softmax(qk/√k) v", "头宽 12 时，完全不缩放", "正确的写法"),
            ("softmax(qk) v, one head", "softmax(qk/√k) v, one head", "只有一个宽头时，完全不缩放", "正确的写法"),
        ),
    ),
    "why-sqrt": Words(
        "为什么要除以头宽的平方根？",
        "宽 8、32、128 的头，除与不除；训练前后的分数",
        "k 个通道的内积，标准差随 √k 增长；不除的话，softmax 会被推到两端",
        f"{VASWANI}，3.2.1 节，没有给出数字",
        ("不除", "除"),
        (("not divided, 8", "divided by √k, 8", "头宽 8 时，不除", "除"),),
        when="头宽 128 时，",
    ),
    "how-many-heads": Words(
        "用多少个头？",
        "模型宽度不变，1 到 16 个头",
        "几个头可以同时看几个地方；再多就没有多大差别",
        f"{VASWANI}，表 3：只用一个头，比最好的头数低 0.9 BLEU",
        ("1 个头", " 4 个头"),
        (("16 heads", "4 heads", "16 个头", " 4 个头"),),
    ),
    "heads": Words(
        "哪些层看得近，哪些层看得远？",
        "每个头的注意力距离，训练前与训练后",
        "最低的几层里，看得近的头和看得远的头并存；更深的层看得远",
        f"{VIT}，图 7 右",
        ("最后一层", "第一层"),
        measure=Measure("看得远", "看得近", "像素", 1),
    ),
    "attention-distance": Words(
        "注意力随深度看得更远吗？与 CNN 相比如何？",
        "九层；与 ResNet 各阶段对照",
        "注意力距离随深度增长；CNN 的感受野天生如此",
        f"{VIT}，图 7 右与图 11",
        ("最后三分之一的层", "最前三分之一"),
        (("ViT", "ResNet", "准确率方面，ViT ", " ResNet "),),
        Measure("看得远", "看得近", "像素", 1),
    ),
    "depth-width": Words(
        "深一些还是宽一些？",
        "乘加次数相同，深度 1 到 7",
        "加深比加宽有用，收益递减",
        f"{VIT}，图 8：加深收益最大，超过 16 层后收益变小",
        ("最宽的模型", "最深的模型"),
    ),
    "dropout": Words(
        "dropout 有用吗？",
        "0、0.1 和 0.3，少量图片与全部图片",
        "论文在 ImageNet 和 ImageNet-21k 上用 0.1，在 JFT-300M 上不用：图片少时才需要",
        f"{VIT}，表 3",
        ("dropout 0.1 ", "不用"),
        (("0.1, all", "0, all", "用全部图片时，dropout 0.1 ", "不用"),),
        when="只用 1/16 的图片时，",
    ),
    "gradient-accumulation-and-normalisation": Words(
        "把一个批次分几部分计算，训练还一样吗？",
        "层归一化与批归一化，整批计算与分八部分计算",
        "层归一化只看单个 token，分开计算毫无影响；批归一化看的是那一部分",
        "Ba 等 2016，Ioffe 与 Szegedy 2015，没有给出数字",
        ("分开计算", "整批计算"),
        (("layer norm, in parts", "layer norm", "用层归一化时，分开计算", "整批计算"),),
        when="用批归一化时，",
    ),
}
