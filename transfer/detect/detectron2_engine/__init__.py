"""Training in detectron2 (``--engine detectron2``): its model, solver, trainer and checkpoints on our data and protocols.

Nothing of detectron2 is imported before it is needed: only ``heads`` is made of its classes.
"""
