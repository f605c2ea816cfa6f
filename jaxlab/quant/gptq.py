"""GPTQ with static groups and activation order, for any grid that is given by its units.

For a kernel w [I, O] (its columns are the paper's rows, so all is contiguous), H = 2/n sum x^T x:
  perm = argsort(-diag H);  Hp = H[perm, perm] + damp mean(diag H) 1;  Hp^-1 = U^T U, U upper
  for i in perm:  q_i = round(w_i, unit of i's own group);  e_i = (w_i - q_i) / U_ii
                  w_j -= U_ij e_i  for j after i
Units are fitted before and stay, so the result has the ordinary layout: no index of groups is kept.
U comes from one factorisation: with J the exchange, chol(J Hp J) = L gives Hp = R R^T, R = J L J
upper, and U = R^-1. Source: arXiv 2210.17323 algorithm 1; 2509.23202 and its code for static groups
with order; specification §3.3-3.4. Dims: I in, O out, k blocks of the inputs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from jaxlab.quant import scales

ORDERS = ("default", "activation")
RETRIES = 3  # of a factorisation, each with ten times the damping
EXACT = jax.lax.Precision.HIGHEST


class Factor(NamedTuple):
  """What all kernels of one input share.

  inverse_II: U of the ordered, damped Hessian. perm_I: input at each place of the order.
  dead_I: inputs (in their own order) that are always zero. damp: as used, relative to mean(diag H).
  retries: how often the damping was raised.
  """

  inverse_II: Float32[Array, "I I"]
  perm_I: Int[Array, "I"]
  dead_I: Bool[Array, "I"]
  damp: float
  retries: int


def factorise(hessian_II: Float32[Array, "I I"], damp: float, order: str = "activation") -> Factor:
  """U, for every kernel that multiplies these inputs.

  Args:
    damp: added to the diagonal, relative to its mean.
    order: "activation" quantises inputs by falling diag H, "default" as they come.
  Raises: ValueError for an unknown order, or if the Hessian stays indefinite (or is not finite)
    after RETRIES tenfold dampings.
  """
  if order not in ORDERS:
    raise ValueError(f"factorise: order must be one of {', '.join(ORDERS)}; got {order!r}.")
  for retry in range(RETRIES + 1):
    used = damp * 10**retry
    inverse_II, perm_I, dead_I, ok = _factorise(hessian_II, jnp.float32(used), order)
    if bool(ok):
      return Factor(inverse_II, perm_I, dead_I, used, retry)
  raise ValueError(
    f"factorise: the Hessian must become positive definite; got failures up to damp={used:g}. "
    "Check the calibration text for inputs that are not finite, or raise damp."
  )


@functools.partial(jax.jit, static_argnames="order")
def _factorise(hessian_II, damp, order):
  diagonal_I = jnp.diagonal(hessian_II)
  dead_I = diagonal_I == 0
  mean = jnp.mean(jnp.where(dead_I, 1.0, diagonal_I))
  perm_I = jnp.arange(diagonal_I.size)
  if order == "activation":
    perm_I = jnp.argsort(-diagonal_I, stable=True)
  h_II = jnp.where(dead_I[:, None] | dead_I[None], 0.0, hessian_II)
  h_II = h_II[perm_I][:, perm_I]
  h_II = h_II + jnp.diag(dead_I[perm_I].astype(jnp.float32) + damp * mean)
  lower_II = jnp.linalg.cholesky(h_II[::-1, ::-1])
  root_II = lower_II[::-1, ::-1]
  inverse_II = jax.scipy.linalg.solve_triangular(root_II, jnp.eye(perm_I.size), lower=False)
  return inverse_II, perm_I, dead_I, jnp.all(jnp.isfinite(inverse_II))


def solve(
  w_IO: Float32[Array, "I O"],
  unit_kO: Float32[Array, "k O"],
  factor: Factor,
  *,
  block: int = 128,
) -> Float32[Array, "I O"]:
  """The kernel on the grid of `unit_kO`, each input's error made up for by those after it.

  One program per shape; columns are independent, so that w and units may be sharded along O with
  the factor replicated.

  Args:
    unit_kO: the value of code 1.0 for each I / k inputs (`scales.block_units`, transposed).
    block: inputs whose errors reach the rest together: speed, not results.
  """
  return _solve(
    w_IO, unit_kO, factor.inverse_II, factor.perm_I, factor.dead_I, min(block, len(w_IO))
  )


@functools.partial(jax.jit, static_argnames="block")
def _solve(w_IO, unit_kO, inverse_II, perm_I, dead_I, block):
  inputs, outputs = w_IO.shape
  padded = -(-inputs // block) * block
  group_I = jnp.pad(perm_I // (inputs // unit_kO.shape[0]), (0, padded - inputs))
  w_IO = jnp.where(dead_I[:, None], 0.0, w_IO)[perm_I]
  w_IO = jnp.pad(w_IO, ((0, padded - inputs), (0, 0)))
  u_II = jnp.eye(padded).at[:inputs, :inputs].set(inverse_II)
  place_I = jnp.arange(padded)

  def one_block(w_IO, start):
    rows_bO = jax.lax.dynamic_slice_in_dim(w_IO, start, block)
    u_bI = jax.lax.dynamic_slice_in_dim(u_II, start, block)
    u_bb = jax.lax.dynamic_slice_in_dim(u_bI, start, block, axis=1)

    def one_input(i, carry):
      rows_bO, error_bO = carry
      q_O = scales.round_to_grid(rows_bO[i], unit_kO[group_I[start + i]])
      error_O = (rows_bO[i] - q_O) / u_bb[i, i]
      rows_bO = rows_bO - u_bb[i][:, None] * error_O[None]  # zero before i
      return rows_bO.at[i].set(q_O), error_bO.at[i].set(error_O)

    rows_bO, error_bO = jax.lax.fori_loop(0, block, one_input, (rows_bO, jnp.zeros_like(rows_bO)))
    u_bI = jnp.where(place_I[None] >= start + block, u_bI, 0.0)
    w_IO = w_IO - jnp.matmul(u_bI.T, error_bO, precision=EXACT)
    return jax.lax.dynamic_update_slice_in_dim(w_IO, rows_bO, start, axis=0), None

  w_IO, _ = jax.lax.scan(one_block, w_IO, jnp.arange(0, padded, block))
  return jnp.zeros((inputs, outputs)).at[perm_I].set(w_IO[:inputs])


@jax.jit
def squared_outputs(
  v_IO: Float32[Array, "I O"], hessian_II: Float32[Array, "I I"]
) -> Float32[Array, "O"]:
  """The diagonal of V^T H V: each output's mean square (times 2T) over the calibration set."""
  return jnp.sum(v_IO * jnp.matmul(hessian_II, v_IO, precision=EXACT), axis=0)
