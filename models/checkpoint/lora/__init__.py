"""LoRA adapters: their files."""
