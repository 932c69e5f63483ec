"""How ``zoo.weights.safe`` reads a file: by looking, never by running.

``examine`` finds out what the file is. ``layouts`` reads where things lie in ZIP archives and safetensors
files. ``pickles`` reads pickles as notes (``notes``) of what they ask for, and calls nothing. ``inert`` makes
values of the notes that it knows, and ``dense`` makes tensors and arrays, whose sizes it checks first.

Why not ``torch.load(weights_only=True)``: before torch 2.10 a made-up file corrupts memory with it
(CVE-2026-24747), its list of names is shared by the whole process and changed by others, sizes that a file
claims are allocated before they are compared, and it reads only some protocols, with warnings. Why not
``pickle.Unpickler`` with a ``find_class`` of ours: what is on its stack can still be called, filled and
indexed, and a few bytes can claim gigabytes.
"""
