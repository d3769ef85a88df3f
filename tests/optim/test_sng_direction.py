"""The update against numpy's normal equations, Kaczmarz, full Gauss-Newton, and its own limits."""

import numpy as np
import pytest
import torch

from cameraready.optim.sng import MatrixFreeJacobian, sng_direction, spring_update

pytestmark = pytest.mark.torch


def system(k=5, n=12, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(k, n, generator=generator, dtype=torch.float64).to(dtype)
    return J, torch.randn(k, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("k", "n"), [(5, 12), (12, 5), (1, 3), (4, 4)])
@pytest.mark.parametrize("damping", [1e-4, 0.3, 50.0])
def test_it_solves_the_damped_normal_equations(k, n, damping):
    J, r = system(k, n)
    A = J.numpy()
    expected = np.linalg.solve(A.T @ A + damping * np.eye(n), A.T @ r.numpy())
    np.testing.assert_allclose(sng_direction(J, r, damping), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("k", "n"), [(5, 12), (12, 5)])
def test_without_damping_it_is_the_pseudo_inverse(k, n):
    J, r = system(k, n)
    np.testing.assert_allclose(sng_direction(J, r, 0.0), np.linalg.pinv(J.numpy()) @ r.numpy(), rtol=1e-8, atol=1e-10)


def test_a_batch_of_one_without_damping_is_a_kaczmarz_step():
    J, _ = system(20, 6)
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(20, generator=generator, dtype=torch.float64)
    theta = torch.zeros(6, dtype=torch.float64)
    by_hand = np.zeros(6)
    for i in torch.randint(20, (50,), generator=generator).tolist():
        theta = theta - sng_direction(J[[i]], J[[i]] @ theta - target[[i]], 0.0)
        a = J[i].numpy()
        by_hand = by_hand + (target[i].item() - a @ by_hand) / (a @ a) * a
        np.testing.assert_allclose(theta, by_hand, rtol=1e-10, atol=1e-12)


def test_spring_is_the_closest_direction_to_its_last_that_fits_the_batch():
    """mu = 1 in the limit and no damping: among all directions with J d = r the one closest to mu phi."""
    J, r = system()
    generator = torch.Generator().manual_seed(2)
    phi = torch.randn(12, generator=generator, dtype=torch.float64)
    mu = 0.7
    found = spring_update(J, r, phi, mu, 0.0)
    torch.testing.assert_close(J @ found, r, rtol=1e-10, atol=1e-12)
    null = torch.linalg.svd(J).Vh[5:]
    torch.testing.assert_close(null @ found, null @ (mu * phi), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_spring_minimises_its_regularised_least_squares(damping):
    J, r = system()
    phi = torch.linspace(-1, 1, 12, dtype=torch.float64)
    A = np.vstack([J.numpy(), np.sqrt(damping) * np.eye(12)])
    b = np.concatenate([r.numpy(), np.sqrt(damping) * 0.9 * phi.numpy()])
    expected = np.linalg.lstsq(A, b, rcond=None)[0]
    np.testing.assert_allclose(spring_update(J, r, phi, 0.9, damping), expected, rtol=1e-8, atol=1e-10)


def test_without_momentum_spring_is_sng():
    J, r = system()
    phi = torch.ones(12, dtype=torch.float64)
    assert torch.equal(spring_update(J, r, phi, 0.0, 1e-2), sng_direction(J, r, 1e-2))


def test_heavy_ball_is_another_method():
    J, r = system()
    phi = torch.ones(12, dtype=torch.float64)
    heavy = 0.9 * phi + sng_direction(J, r, 1e-2)
    assert (spring_update(J, r, phi, 0.9, 1e-2) - heavy).norm() > 0.1 * heavy.norm()


def test_the_direction_is_linear_in_the_residual_and_scales_inversely_with_the_jacobian():
    J, r = system()
    torch.testing.assert_close(sng_direction(J, 3 * r, 0.1), 3 * sng_direction(J, r, 0.1))
    torch.testing.assert_close(sng_direction(2 * J, r, 0.4), sng_direction(J, r, 0.1) / 2)


def test_the_order_of_samples_and_a_rotation_of_parameters_do_not_matter():
    J, r = system()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(sng_direction(J[order], r[order], 0.1), sng_direction(J, r, 0.1))
    Q = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)).Q
    torch.testing.assert_close(sng_direction(J @ Q, r, 0.1), Q.T @ sng_direction(J, r, 0.1))


@pytest.mark.parametrize("damping", [0.0, 1e-18, 1e-8])
def test_repeated_samples_make_no_trouble(damping):
    """Twice the same sample is that sample with half the damping."""
    J, r = system()
    twice = sng_direction(torch.cat([J, J]), torch.cat([r, r]), damping)
    torch.testing.assert_close(twice, sng_direction(J, r, damping / 2), rtol=1e-6, atol=1e-9)


def test_centring_makes_constants_added_to_outputs_invisible():
    J, r = system()
    shift = torch.linspace(-2, 2, 12, dtype=torch.float64)
    plain = sng_direction(J, r, 0.1, centered=True)
    torch.testing.assert_close(sng_direction(J + shift, r + 5.0, 0.1, centered=True), plain)
    A = (J - J.mean(dim=0)).numpy()
    b = (r - r.mean()).numpy()
    np.testing.assert_allclose(plain, np.linalg.solve(A.T @ A + 0.1 * np.eye(12), A.T @ b), rtol=1e-9)


def test_centring_without_damping_has_no_singular_system():
    J, r = system()
    A, b = (J - J.mean(dim=0)).numpy(), (r - r.mean()).numpy()
    np.testing.assert_allclose(sng_direction(J, r, 0.0, centered=True), np.linalg.pinv(A) @ b, rtol=1e-8, atol=1e-10)


def test_products_alone_give_the_same():
    J, r = system()
    phi = torch.linspace(0, 1, 12, dtype=torch.float64)
    free = MatrixFreeJacobian(lambda v: J @ v, lambda z: J.T @ z, (5, 12), dtype=torch.float64)
    for centered in (False, True):
        torch.testing.assert_close(
            spring_update(free, r, phi, 0.9, 0.01, centered=centered),
            spring_update(J, r, phi, 0.9, 0.01, centered=centered),
        )


def test_single_precision_loses_no_more_than_its_own_rounding():
    """The kernel squares the condition number; solved in single precision it would lose all digits here."""
    generator = torch.Generator().manual_seed(5)
    U = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(20, 8, generator=generator, dtype=torch.float64)).Q
    J = ((U * 10.0 ** -torch.linspace(0, 3.5, 8, dtype=torch.float64)) @ V.T).float()
    r = (J.double() @ torch.ones(20, dtype=torch.float64)).float()
    exact = sng_direction(J.double(), r.double(), 1e-9)
    found = sng_direction(J, r, 1e-9)
    assert found.dtype == torch.float32
    naive = J.T @ torch.linalg.solve(J @ J.T + 1e-9 * torch.eye(8), r)
    error = (found - exact).norm() / exact.norm()
    assert error < 1e-3
    assert error < 0.01 * (naive - exact).norm() / exact.norm()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"jacobian": torch.zeros(3)}, ValueError, r"shape \(k, n\)"),
        ({"jacobian": torch.zeros(5, 12, dtype=torch.complex64)}, TypeError, "real"),
        ({"residual": torch.zeros(4)}, ValueError, r"shape \(5,\), got \(4,\)"),
        ({"phi": torch.zeros(3)}, ValueError, r"shape \(12,\), got \(3,\)"),
        ({"mu": 1.0}, ValueError, "mu must be"),
        ({"mu": -0.1}, ValueError, "mu must be"),
        ({"damping": -1.0}, ValueError, "damping must be"),
        ({"damping": float("nan")}, ValueError, "damping must be"),
        ({"residual": torch.full((5,), float("nan"), dtype=torch.float64)}, ValueError, "not finite"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, says):
    J, r = system()
    given = {"jacobian": J, "residual": r, "phi": torch.zeros(12, dtype=torch.float64), "mu": 0.5, "damping": 0.1}
    with pytest.raises(error, match=says):
        spring_update(**{**given, **change})


def test_products_of_a_wrong_shape_are_refused():
    J, r = system()
    with pytest.raises(ValueError, match=r"vjp returned shape \(5,\), expected \(12,\)"):
        sng_direction(MatrixFreeJacobian(lambda v: J @ v, lambda z: z, (5, 12), dtype=torch.float64), r, 0.1)


@pytest.mark.parametrize("scale", [1e-10, 1e-5, 1e10])
@pytest.mark.parametrize("damping", [0.0, 1e-6])
def test_centring_does_not_depend_on_the_scale_of_outputs(scale, damping):
    J, r = system(5, 7)
    plain = sng_direction(J, r, damping, centered=True)
    scaled = sng_direction(scale * J, r, scale**2 * damping, centered=True)
    torch.testing.assert_close(scale * scaled, plain, rtol=1e-7, atol=1e-9)


def test_numbers_of_different_precision_are_refused():
    J, r = system()
    with pytest.raises(TypeError, match=r"Jacobian is torch\.float32 and the residual torch\.float64"):
        sng_direction(J.float(), r, 0.1)
    with pytest.raises(TypeError, match=r"phi is torch\.float32"):
        spring_update(J, r, torch.zeros(12), 0.5, 0.1)
    with pytest.raises(TypeError, match="float32 or float64"):
        sng_direction(J.half(), r.half(), 0.1)


def test_products_that_are_not_adjoint_are_refused():
    J, r = system()
    free = MatrixFreeJacobian(lambda v: J @ v, lambda z: J.roll(1, 0).T @ z, (5, 12), dtype=torch.float64)
    with pytest.raises(ValueError, match="not adjoint"):
        sng_direction(free, r, 0.1)
