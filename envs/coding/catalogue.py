"""The pinned source distributions tasks are made from: name, version, sha256, licence, suite, sources.

Only data lives here. Nothing of these packages is part of this repository: `sdist.py` fetches them
with pip and refuses any byte that does not match the hash. Test files that need packages which are not
installed (freezegun, pytest-codspeed), depend on timing or count sub-tests are left out by naming the
others.
"""

from __future__ import annotations

import dataclasses

from gagar_jax.types import UserError


class UnknownPackage(UserError):
    """A setting names a package that the catalogue does not have."""


@dataclasses.dataclass(frozen=True)
class Package:
    """One source distribution.

    import_roots: folders (relative to the unpacked tree) to put on `PYTHONPATH`.
    sources: files or folders that bugs may be put into; also: what else the suite needs in the tree.
    tests: what pytest is given; deselect: node ids it is told to leave out.
    licence: the SPDX name of the package's licence.
    """

    name: str
    version: str
    sha256: str
    licence: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    import_roots: tuple[str, ...] = (".",)
    deselect: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


_PACKAGES = (
    Package(
        name="toolz",
        version="1.0.0",
        sha256="2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
        licence="BSD-3-Clause",
        sources=("toolz",),
        tests=("toolz/tests",),
        also=("tlz",),
    ),
    Package(
        name="inflection",
        version="0.5.1",
        sha256="1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        licence="MIT",
        sources=("inflection",),
        tests=("test_inflection.py",),
    ),
    Package(
        name="humanize",
        version="4.17.0",
        sha256="1d6a36c453dbfbb3f0b34601d2e0b4ce5d48d780305cd45714843f0068fde6ac",
        licence="MIT",
        sources=("src/humanize",),
        tests=("tests/test_filesize.py", "tests/test_lists.py", "tests/test_number.py"),
        import_roots=("src",),
    ),
    Package(
        name="cachetools",
        version="8.0.2",
        sha256="30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0",
        licence="MIT",
        sources=("src/cachetools",),
        tests=(
            "tests/test_cache.py",
            "tests/test_cached.py",
            "tests/test_cachedmethod.py",
            "tests/test_fifo.py",
            "tests/test_func.py",
            "tests/test_keys.py",
            "tests/test_lfu.py",
            "tests/test_lru.py",
            "tests/test_rr.py",
            "tests/test_tlru.py",
            "tests/test_ttl.py",
        ),
        import_roots=("src",),
        deselect=(
            "tests/test_cachedmethod.py::CacheMethodTest::test_cond_pending_keyword",
            "tests/test_cachedmethod.py::UnboundMethodTest::test_class_access_pickle",
        ),
    ),
    Package(
        name="tinydb",
        version="4.9.0",
        sha256="6928b1fa785186bda7952a0ba05aaeedc883ede565ca9c7d608de44e5e75de70",
        licence="MIT",
        sources=("tinydb",),
        tests=("tests",),
    ),
    Package(
        name="voluptuous",
        version="0.16.0",
        sha256="006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05",
        licence="BSD-3-Clause",
        sources=("voluptuous",),
        tests=("voluptuous/tests/tests.py",),
    ),
    Package(
        name="parse",
        version="1.22.4",
        sha256="706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5",
        licence="MIT",
        sources=("parse",),
        tests=("tests",),
    ),
    Package(
        name="schedule",
        version="1.2.2",
        sha256="15fe9c75fe5fd9b9627f3f19cc0ef1420508f9f9a46f45cd0769ef75ede5f0b7",
        licence="MIT",
        sources=("schedule",),
        tests=("test_schedule.py",),
    ),
    Package(
        name="itsdangerous",
        version="2.2.0",
        sha256="e0050c0b7da1eea53ffaf149c0cfbb5c6e2e2b69c4bef22c81fa6eb73e5f6173",
        licence="BSD-3-Clause",
        sources=("src/itsdangerous",),
        tests=(
            "tests/test_itsdangerous/test_encoding.py",
            "tests/test_itsdangerous/test_serializer.py",
            "tests/test_itsdangerous/test_signer.py",
        ),
        import_roots=("src",),
    ),
    Package(
        name="tabulate",
        version="0.8.10",
        sha256="6c57f3f3dd7ac2782770155f3adb2db0b1a269637e42f27599925e64b114f519",
        licence="MIT",
        sources=("tabulate.py",),
        tests=("test",),
    ),
    Package(
        name="sqlparse",
        version="0.6.1",
        sha256="ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7",
        licence="BSD-3-Clause",
        sources=("sqlparse",),
        tests=("tests",),
    ),
    Package(
        name="boltons",
        version="26.2.0",
        sha256="d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c",
        licence="BSD-3-Clause",
        sources=("boltons",),
        tests=("tests",),
    ),
)

CATALOGUE: dict[str, Package] = {package.name: package for package in _PACKAGES}
"""By name, the cheapest suites first."""


def select(names: tuple[str, ...]) -> list[Package]:
    """The named packages, in the order given; all of them for an empty tuple.

    Raises:
      UnknownPackage: a name is not in the catalogue.
    """
    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        raise UnknownPackage(
            f"tasks.packages: unknown {', '.join(unknown)}; the catalogue has {', '.join(CATALOGUE)}"
        )
    return [CATALOGUE[name] for name in names] or list(CATALOGUE.values())
