"""Spaniel: post-train language models with rewards."""

__version__ = "0.1.0"
