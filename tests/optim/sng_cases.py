"""SNG and SPRING, from residuals and from outputs with their derivative, for the conformance test of optimizers."""

from cameraready.optim.sng import SNG, SPRING, linearise
from tests.optim.optimizer_cases import Case


def residual_closure(model, optimizer, x, y):
    return lambda: model(x) - y


def outputs_closure(model, optimizer, x, y):
    def closure():
        outputs = model(x)
        return outputs, outputs.detach() - y

    return closure


def linearised_closure(model, optimizer, x, y):
    from torch.func import functional_call

    def residual(params, x, y):
        return functional_call(model, params, (x,)) - y

    return lambda: linearise(residual, dict(model.named_parameters()), x, y)


def sng(model, groups, **options):
    return SNG(groups, **{"lr": 0.5, "damping": 1e-2, **options})


def spring(model, groups, **options):
    return SPRING(groups, **{"mu": 0.5, "damping": 1e-2, **options})


CASES = [
    Case("sng", sng, residual_closure),
    Case("spring", spring, residual_closure),
    Case("spring-outputs", spring, outputs_closure),
    Case("spring-linearised", spring, linearised_closure),
]
