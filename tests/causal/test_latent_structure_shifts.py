"""Shifted mechanisms: the likelihood's gradient, agreement with closed forms, sets recovered, and no false alarms."""

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import check_grad

from cameraready.causal._scm import domains_of, linear_scm, sample_domains
from cameraready.causal.latent_structure import LatentStructure
from cameraready.causal.latent_structure.domains import summarise
from cameraready.causal.latent_structure.shifts import MultiGroupModel, _holm, _Layout, find_shifts

INDICATORS = [f"x{i}" for i in range(6)]


def factor(seed, n_domains, rows, changed=(), *, latent_factor=1.0):
    """One latent with six indicators; the mechanisms `changed` are redrawn in every domain, the latent's variance scaled."""
    rng = np.random.default_rng(seed)
    scm = linear_scm([("A", x) for x in INDICATORS], rng, latent=["A"])
    family = domains_of(scm, n_domains, "both", rng, variables=list(changed))
    family = [member.shift("A", noise_factor=latent_factor**i) for i, member in enumerate(family)]
    values, labels = sample_domains(family, rows, rng)
    return scm, pd.DataFrame(values, columns=scm.observed), labels


def test_the_gradient_is_that_of_the_likelihood():
    rng = np.random.default_rng(0)
    edges = [
        *(("A", f"a{i}") for i in range(3)),
        ("A", "B"),
        ("a0", "o"),
        ("B", "o"),
        *(("B", f"b{i}") for i in range(3)),
    ]
    scm = linear_scm(edges, rng, latent="AB")
    values, labels = sample_domains(domains_of(scm, 3, "both", rng), 100, rng)
    model = MultiGroupModel(scm.graph, summarise(pd.DataFrame(values, columns=scm.observed), labels))
    layout = _Layout(model, {0, 3, 8}, set())
    x = layout.pack(model._start()) + 0.1 * rng.normal(size=layout.count)
    error = check_grad(lambda x: model._objective(layout, x)[0], lambda x: model._objective(layout, x)[1], x)
    assert error < 1e-5 * np.linalg.norm(model._objective(layout, x)[1])


def test_observed_regression_is_fitted_by_least_squares():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 3)) @ np.triu(rng.normal(size=(3, 3)))
    domains = summarise(pd.DataFrame(values, columns=list("abc")))
    model = MultiGroupModel(nx.DiGraph([("a", "c"), ("b", "c")]), domains)
    fit = model.fit(())
    covariance = domains.covariances[0]
    slopes = np.linalg.solve(covariance[:2, :2], covariance[:2, 2])
    np.testing.assert_allclose(fit.coefficients[0, :2, 2], slopes, atol=1e-3)
    assert fit.variances[0, 2] == pytest.approx(covariance[2, 2] - slopes @ covariance[:2, 2], rel=1e-3)


def test_three_indicators_fit_exactly():
    """A one-factor model of three indicators is saturated: the deviance is that of the sample covariance."""
    _, table, _ = factor(2, 1, 400)
    domains = summarise(table[INDICATORS[:3]])
    graph = nx.DiGraph([("L", x) for x in INDICATORS[:3]])
    graph.nodes["L"]["latent"] = True
    model = MultiGroupModel(graph, domains)
    saturated = model.weights[0] * (np.linalg.slogdet(domains.covariances[0])[1] + 3)
    assert model.fit(()).deviance == pytest.approx(saturated, abs=0.02)


def test_the_fit_does_not_depend_on_units():
    _, table, labels = factor(3, 2, 200, ["x1"])
    graph = linear_scm([("A", x) for x in INDICATORS], np.random.default_rng(0), latent=["A"]).graph
    scaled = table * np.array([1, 10, 0.1, 1e4, 3, 1e-3])
    a, b = (find_shifts(graph, summarise(t, labels)) for t in (table, scaled))
    np.testing.assert_allclose(a["statistic"], b["statistic"], rtol=0.02, atol=0.05)


@pytest.mark.parametrize("changed", [(), ("x1",), ("x0", "x4")])
def test_the_changed_indicators_are_found_in_five_domains(changed):
    exact = 0
    for seed in range(4):
        scm, table, labels = factor(seed, 5, 200, changed, latent_factor=1.4)
        found = find_shifts(scm.graph, summarise(table, labels))
        exact += set(found.loc[found["shifted"] & ~found["latent"], "variable"]) == set(changed)
    assert exact >= 3


def test_a_latents_variance_is_told_from_its_indicators():
    scm, table, labels = factor(7, 3, 400, latent_factor=1.7)
    found = find_shifts(scm.graph, summarise(table, labels)).set_index("variable")
    assert found.loc["A", "shifted"]
    assert not found.loc[INDICATORS, "shifted"].any()
    scm, table, labels = factor(7, 3, 400)
    assert not find_shifts(scm.graph, summarise(table, labels))["shifted"].any()


def test_pvalues_of_unchanged_mechanisms_are_uniform():
    """Kolmogorov-Smirnov over indicators and replicates without any change."""
    from scipy.stats import kstest

    pvalues = []
    for seed in range(25):
        scm, table, labels = factor(100 + seed, 3, 150)
        found = find_shifts(scm.graph, summarise(table, labels))
        pvalues += list(found.loc[found["variable"].isin(["x0", "x3"]), "pvalue"])
    assert kstest(pvalues, "uniform").pvalue > 0.01


def test_a_majority_of_changes_is_said_to_be_undecidable():
    scm, table, labels = factor(8, 3, 300, INDICATORS)
    with pytest.warns(UserWarning, match="more than half"):
        find_shifts(scm.graph, summarise(table, labels))


def test_the_estimator_reports_shifts_of_what_it_found():
    _, table, labels = factor(9, 4, 300, ["x2"], latent_factor=1.3)
    model = LatentStructure().fit(table, domain=np.array(list("abcd"))[labels])
    assert model.shifts_["variable"].tolist() == [*table.columns, "L1"]
    assert model.shifts_.loc[model.shifts_["shifted"] & ~model.shifts_["latent"], "variable"].tolist() == ["x2"]
    assert LatentStructure().fit(table).shifts_ is None
    with pytest.raises(ValueError, match="there is one"):
        find_shifts(model.graph_, summarise(table))


def test_holms_correction_is_that_of_statsmodels():
    from statsmodels.stats.multitest import multipletests

    pvalues = np.random.default_rng(0).random(9) ** 3
    np.testing.assert_allclose(_holm(pvalues), multipletests(pvalues, method="holm")[1])
