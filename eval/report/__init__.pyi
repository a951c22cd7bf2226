from .paper import write_paper as write_paper
from .retrieval import write_report as write_report
