"""Reading and writing files: model folders, Medusa folders, the Hub, Orbax."""

from specjax.files.checkpoint import Outline, load, read_outline, save
from specjax.files.config import read_config
from specjax.files.drafter import load_drafter, open_drafter, save_drafter
from specjax.files.drafters import FORMATS, Description
from specjax.files.folder import SINGLE, read_json, weight_files
from specjax.files.hub import TOKENIZER, find_folder
from specjax.files.medusa import load_medusa, save_medusa
from specjax.files.tokenizer import read_tokenizer

__all__ = [
    "FORMATS",
    "SINGLE",
    "TOKENIZER",
    "Description",
    "Outline",
    "find_folder",
    "load",
    "load_drafter",
    "load_medusa",
    "open_drafter",
    "read_config",
    "read_json",
    "read_outline",
    "read_tokenizer",
    "save",
    "save_drafter",
    "save_medusa",
    "weight_files",
]
