"""SmolLM2-135M-Instruct from a wheel of the package index: converted, built, checked, and drafted for by prompt lookup.

A real small model that needs no model hub. Only `oracle` imports torch and transformers, and only when it is asked to.
"""
