"""The extra packages whose sources and manuals extend the corpus, pinned, and how they are fetched."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from heads.api.errors import UserError

# Wheels where an sdist would have to be compiled before pip shows it; sdists elsewhere, since they carry the manuals.
WHEELS = (
    "astropy==8.0.2 flax==0.12.8 jax==0.10.2 keras==3.15.1 optuna==5.0.0 scikit-image==0.26.0 scikit-learn==1.9.1 "
    "scipy==1.17.1 seaborn==0.13.2 statsmodels==0.15.0 "
).split()
SDISTS = (
    "apache-airflow-core==3.3.2 arrow==1.4.0 attrs==26.1.0 babel==2.18.0 beautifulsoup4==4.15.0 "
    "biopython==1.88 black==26.10.1 bokeh==3.9.2 boltons==26.2.0 boto3==1.44.5 bottle==0.13.4 "
    "celery==5.7.0 cherrypy==18.10.0 click==8.5.1 cmd2==4.3.1 coverage==7.17.3 dask==2026.8.0 discord-py==2.7.1 "
    "distributed==2026.8.0 django==5.2.19 docopt==0.6.2 docutils==0.23 dulwich==1.2.21 "
    "fabric==3.2.3 fastapi==0.165.0 feedparser==6.0.14 flask==3.1.3 flask-sqlalchemy==3.1.1 "
    "freezegun==1.5.5 gunicorn==27.0.1 httpx==0.28.1 invoke==3.0.3 ipython==9.18.1 jedi==0.20.1 "
    "jinja2==3.1.6 jupyter-client==8.10.0 kombu==5.7.0 lark==1.3.1 luigi==3.8.1 mako==1.4.3 "
    "markdown==3.11.3 marshmallow==4.4.0 mistune==3.4.0 mkdocs==1.6.1 mock==5.2.0 more-itertools==11.2.1 "
    "nbconvert==7.17.2 nbformat==5.11.1 nikola==8.3.3 nltk==3.10.4 nose2==0.16.0 openpyxl==3.1.5 "
    "parso==0.8.7 passlib==1.7.4 pip-tools==7.6.2 ply==3.11 prompt-toolkit==3.0.53 pycparser==3.12 "
    "pymongo==4.20.0 pyramid==2.1 pytest==9.2.0 redis==8.1.0 reportlab==5.1.0 requests==2.34.2 "
    "responses==0.26.3 sanic==25.12.1 scrapy==2.19.0 sentry-sdk==2.75.0 simpy==4.1.2 sly==0.5 "
    "sphinx==9.0.4 starlette==1.10.0 tabulate==0.10.0 textdistance==4.6.3 textual==8.2.8 tomlkit==0.15.2 "
    "toolz==1.2.0 tornado==6.6.1 tox==4.67.13 traitlets==5.16.1 trio==0.35.0 twisted==26.10.0 "
    "websockets==17.4 werkzeug==3.1.9 xarray==2026.9.0 xlsxwriter==3.3.1 zodb==6.4 zope-interface==8.7 "
).split()


def download(folder: Path, workers: int = 3) -> list[Path]:
    """Fetch every pinned package that `folder` does not hold yet through pip, without dependencies; return the archives sorted.

    Raises UserError naming the packages that pip could not get.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(spec, "--only-binary") for spec in WHEELS] + [(spec, "--no-binary") for spec in SDISTS]
    missing = [(spec, kind) for spec, kind in wanted if not _archive(folder, spec)]

    def fetch(job: tuple[str, str]) -> str | None:
        spec, kind = job
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", kind, ":all:", "-d", str(folder), spec]
        return None if subprocess.run(command, capture_output=True, check=False).returncode == 0 else spec

    with ThreadPoolExecutor(workers) as pool:
        failed = [spec for spec in pool.map(fetch, missing) if spec]
    if failed:
        raise UserError(
            f"pip could not download {', '.join(failed)} into {folder}. Run it again, or prepare without --extra-packages."
        )
    return sorted(archive for spec, _ in wanted for archive in _archive(folder, spec))


def _archive(folder: Path, spec: str) -> list[Path]:
    name, _, version = spec.partition("==")
    return [path for path in folder.glob(f"{name.replace('-', '_')}-{version}*") if path.suffix in (".gz", ".whl")]
