TILE = 64


def forward(*a):
    raise NotImplementedError


backward = forward
