r"""VOGN: variational online Gauss–Newton, with the mean of squared per-example gradients.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ḡ = mean_i g_i(θ),   ĥ = mean_i g_i(θ)∘g_i(θ)
    h ← β₂h + (1 − β₂)ĥ
    g ← β₁g + (1 − β₁)(ḡ + δm)
    m ← m − ξ g/((1 − β₁ᵗ)(h + δ + γ))

Squares are never negative and cost little more than the gradient itself (`credo.params.squares`).
They stand for the Hessian where the model is right (both have the mean of the Fisher information);
elsewhere q's variance is off by their ratio, however long one trains: `VON` is the exact one.

====== ==================== ====================================================================
symbol argument             meaning
====== ==================== ====================================================================
ξ      ``lr``               step size; a published heavy-ball rate, which leaves out the factor
                            1 − β₁ above, is this one times 1 − β₁
β₂     ``betas[1]``         share of the *old* curvature; the published ema_decay is 1 − β₂
h₀     ``hess_init``        first curvature; None: what the first step finds, and 1 for its draws
       ``loss_reduction``   how the loss joins examples: "mean" or "sum"
       ``module``           the network, where ``params`` is not it: squares need its layers
====== ==================== ====================================================================

The rest is in `credo.optim.base`. Corrections to the published pseudo-code: the prior counts δ once
in each place, so that the tempered posterior is exact (it has 668.17 where 671.67 is right in the
scalar test), and damping does not widen or narrow the draws. Each example's gradient is summed over
all places where a weight is used before it is squared, biases of convolutions included.

Reference: Osawa et al., 2019 (arXiv:1906.02506); Khan et al., 2018 (arXiv:1806.04854).

    >>> import torch, credo.optim
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> opt = credo.optim.VOGN(net, lr=1e-3, num_data=100)
    >>> x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    >>> with opt.sampled():
    ...     torch.nn.functional.cross_entropy(net(x), y).backward()
    >>> opt.step(); opt.zero_grad()
    >>> opt.posterior(net, credo.likelihoods.Categorical()).q.scale.shape
    torch.Size([26])
"""
