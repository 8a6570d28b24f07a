"""Which BatchNorms less_bn finds and removes in randomly initialised networks of the transformers library."""

from __future__ import annotations

import torch
import transformers as hf

import torchboost

NETWORKS = {
    "ResNet-50": lambda: hf.ResNetModel(hf.ResNetConfig()),
    "ResNet-18": lambda: hf.ResNetModel(
        hf.ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
    ),
    "RegNet": lambda: hf.RegNetModel(hf.RegNetConfig()),
    "MobileNetV2": lambda: hf.MobileNetV2Model(hf.MobileNetV2Config()),
}


def main(full: bool = True) -> dict[str, tuple[int, int, int]]:
    """Return per network the numbers of BatchNorms found, removed, and removed with ``keep_shortcut``."""
    counts = {}
    for name, build in NETWORKS.items():
        torch.manual_seed(0)
        model = build()
        report = torchboost.less_bn(model, dry_run=True)
        mild = torchboost.less_bn(model, keep_shortcut=True, dry_run=True)
        counts[name] = (len(report.found), len(report.removed), len(mild.removed))
        print(f"{name}: {report if full else str(report).splitlines()[0]}")
        print(f"{name}: {len(mild.removed)} with the shortcuts' kept\n")
    return counts


if __name__ == "__main__":
    main()
