"""The side of the study that runs in diffqcp's environment (JAX): its vector-Jacobian product at a given solution."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from diffqcp import HostQCP, QCPStructureCPU
from jax.experimental.sparse import BCOO

jax.config.update("jax_enable_x64", True)


def compiled_product(structure):
    """The gradient of q for programs of one pattern; the pattern is constant, or JAX could not index by it."""

    @eqx.filter_jit
    def product(P, A, q, b, x, y, s, upstream):
        zero = jnp.zeros_like(b)
        return HostQCP(P, A, q, b, x, y, s, structure).vjp(upstream, zero, zero)[2]

    return product


def cone_program(Q, q, rows, target, n_equal):
    """Upper triangle of Q and the rows, equalities first, as diffqcp wants them."""
    P, A = BCOO.fromdense(jnp.array(np.triu(Q))), BCOO.fromdense(jnp.array(rows))
    return P, A, jnp.array(q), jnp.array(target), {"z": n_equal, "l": len(target) - n_equal}


def open_programs(programs, upstreams):
    """Keep programs of one pattern, with upstream gradients of x, and compile their product; nothing is timed."""
    KEPT.clear()
    for given, upstream in zip(programs, upstreams, strict=True):
        P, A, q, b, cones = cone_program(given["Q"], given["q"], given["rows"], given["target"], given["n_equal"])
        x, y, s = (jnp.array(given[name]) for name in ("x", "y", "slack"))
        KEPT.append((P, A, q, b, x, y, s, jnp.array(upstream)))
    PRODUCT["compiled"] = compiled_product(QCPStructureCPU(P, A, cones))
    PRODUCT["compiled"](*KEPT[0]).block_until_ready()


def gradient(place):
    """Gradient of q for the program at `place`, and the seconds it took."""
    started = time.perf_counter()
    found = PRODUCT["compiled"](*KEPT[place]).block_until_ready()
    return {"own_seconds": time.perf_counter() - started, "q": np.asarray(found)}


KEPT, PRODUCT = [], {}
