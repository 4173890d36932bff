"""Unisono with other libraries: one package for each, which is loaded when it is imported by name.

from unisono.integrations.transformers import PretrainedWeights, settings_from, train
"""
