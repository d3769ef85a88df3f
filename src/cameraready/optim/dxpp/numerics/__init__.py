"""The numbers behind the layer: programs, their solution, their sensitivities; numpy and scipy alone."""
