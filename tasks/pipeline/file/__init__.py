"""A pipeline's file: its form, parameters, references, and the requests that it stands for."""
