"""Processes that are begun from one which has imported everything, and has computed nothing."""

import multiprocessing

import pytest


@pytest.fixture(scope="session")
def begin():
    """Begin a process with a function and its arguments; give the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["joblib", "otdd_flash.study.study"])

    def run(function, *arguments):
        process = context.Process(target=function, args=arguments)
        process.start()
        return process

    return run
