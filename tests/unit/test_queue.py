"""The queue: order, credits, checks, faults, restarts. Hub, producer loop and arena are real; the engine is a toy."""

import socket
import threading
import time

import msgspec
import pytest
from queue_bench import bench, check_rows, request, soak
from queue_toy import ToyEngine

from eagle3_lightning.errors import ConfigError, ProducerError, SampleError
from eagle3_lightning.stream.messages import Dropped, Mistake
from eagle3_lightning.stream.queue import FinishedSample, SampleQueue


def take_all(queue, stream="train"):
    items = []
    while (item := queue.get(stream)) is not None:
        if isinstance(item, FinishedSample):
            check_rows(item)
            item.release()
        items.append(item)
    return items


def test_samples_come_in_the_order_of_their_index_with_their_own_rows():
    with bench() as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i) for i in range(7, 207)), start_index=7)
        items = take_all(b.queues[0])
        assert [item.index for item in items] == list(range(7, 207))
        assert b.queues[0].get("train") is None, "the end is there to stay"
        for item in items[:20]:
            assert item.spans == [(item.prompt_tokens, len(item.token_ids))]
            assert item.num_rows == len(item.token_ids) - 1
        stats = b.queues[0].stats()
        assert stats.taken == 200 and stats.cut == sum(item.was_cut for item in items) > 0
        assert stats.depth_samples == stats.depth_tokens == 0


def test_prefill_keeps_the_spans_and_a_row_for_every_token():
    with bench() as b:
        b.start_producer()
        submits = [msgspec.structs.replace(request(i, 5 + i, 0), spans=[(1, 3), (4, 5)]) for i in range(5)]
        b.queues[0].feed("train", iter(submits))
        for item in take_all(b.queues[0]):
            assert item.num_rows == len(item.token_ids) == 5 + item.index
            assert item.spans == [(1, 3), (4, 5)] and not item.was_cut


def test_nothing_is_submitted_without_free_blocks_and_releases_let_it_go_on():
    with bench(num_blocks=6, window=100) as b:
        engine = b.start_producer()
        queue = b.queues[0]
        queue.feed("train", (request(i, prompt_tokens=6, max_new_tokens=2) for i in range(10)))  # 2 blocks each
        first = queue.get("train")
        deadline_s = time.monotonic() + 5
        while queue.stats().depth_samples < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.2)
        assert queue.stats().depth_samples == 2, "three samples of two blocks fill six blocks"
        assert engine.num_running == 0
        first.release()
        held = [queue.get("train"), queue.get("train")]
        fourth = queue.get("train")
        assert fourth.index == 3
        for sample in (*held, fourth):
            check_rows(sample)
            sample.release()
        assert [item.index for item in take_all(queue)] == list(range(4, 10))
        assert queue.stats().spilled == 0


def test_blocks_of_answers_that_stop_early_come_back_at_once():
    with bench(num_blocks=10) as b:
        b.start_producer()
        # 2 + 38 tokens reserve all ten blocks; the toy answers index 0 with one token.
        b.queues[0].feed("train", (request(i, prompt_tokens=2, max_new_tokens=38 if i == 0 else 2) for i in range(3)))
        held = [b.queues[0].get("train") for _ in range(3)]
        assert [sample.num_rows for sample in held] == [2, 3, 2]
        assert b.queues[0].stats().spilled == 0


def test_a_trainer_that_holds_more_than_the_arena_goes_on():
    with bench(num_blocks=6) as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i, prompt_tokens=6, max_new_tokens=2) for i in range(20)))
        held = []
        while (sample := b.queues[0].get("train")) is not None:
            held.append(sample)
        assert len(held) == 20 and b.queues[0].stats().spilled > 0
        for sample in held:
            check_rows(sample)
            sample.release()


def test_thousands_of_samples_give_way_while_thousands_arrive():
    """The rank has more to say than a socket holds, and the hub too: neither may wait until the other listens."""
    with bench(num_blocks=3000, window=9000) as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i, 3, 1, name="x" * 1000) for i in range(6000)))
        held = [b.queues[0].get("train") for _ in range(3500)]
        assert [sample.index for sample in held] == list(range(3500))
        assert b.queues[0].stats().spilled >= 500


def test_a_second_stream_does_not_starve_the_first():
    with bench(num_blocks=8) as b:
        b.start_producer()
        b.queues[0].feed("val", (request(i, 6, 2, stream="val") for i in range(10)))
        time.sleep(0.3)  # the arena is full of val samples that nobody takes
        b.queues[0].feed("train", (request(i, 6, 2) for i in range(10)))
        assert [item.index for item in take_all(b.queues[0])] == list(range(10))
        assert [item.index for item in take_all(b.queues[0], "val")] == list(range(10))


def test_dropped_samples_keep_their_place_and_are_counted():
    with bench(max_dropped_share=1.0, num_blocks=16) as b:
        b.start_producer()
        special = {3: "refuse me", 5: "abort me"}

        def requests():
            for i in range(10):
                if i == 7:
                    yield Dropped("train", 7, "s7", "empty_mask", "nothing is supervised")
                else:
                    yield request(i, prompt_tokens=70 if i == 8 else None, name=special.get(i))

        b.queues[0].feed("train", requests())
        items = take_all(b.queues[0])
        assert [item.index for item in items] == list(range(10))
        reasons = {item.index: item.reason for item in items if isinstance(item, Dropped)}
        assert reasons == {3: "too_long", 5: "aborted", 7: "empty_mask", 8: "too_long"}
        stats = b.queues[0].stats()
        assert stats.dropped == {"too_long": 2, "aborted": 1, "empty_mask": 1}
        assert "s8" in stats.dropped_names["too_long"][1]
        deadline_s = time.monotonic() + 5
        while b.queues[0].stats().producer.free_blocks != 16 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert b.queues[0].stats().producer.free_blocks == 16, "dropped samples leave no block behind"


class FaultyEngine(ToyEngine):
    """Spoils the rows of sample 2 in a given way."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def _finish(self, name):
        request = self._running[name][0]
        finished = super()._finish(name)
        index = self.arena.row_index(request.blocks, 3)
        if request.index == 2:
            match self.fault:
                case "token_mismatch":
                    self.arena.ids[index[1]] += 1
                case "non_finite":
                    self.arena.finite[index[2]] = 0
                case "row_mismatch":
                    self.arena.headers[request.blocks[0], 1] = -1
        return finished


@pytest.mark.parametrize("fault", ["token_mismatch", "non_finite", "row_mismatch"])
def test_spoiled_rows_are_dropped_and_their_blocks_freed(fault):
    with bench(num_blocks=16) as b:
        b.start_producer(FaultyEngine(fault))
        b.queues[0].feed("train", (request(i) for i in range(30)))
        items = take_all(b.queues[0])
        assert [item.index for item in items if isinstance(item, Dropped)] == [2]
        assert items[2].reason == fault and items[2].detail


def test_too_many_drops_end_the_run_with_the_reasons():
    with bench() as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i, name="abort me" if i % 10 == 0 else None) for i in range(300)))
        with pytest.raises(SampleError, match=r"(?s)max_dropped_share = 0.05.*aborted: \d+, e.g. train 0 \(abort me\)"):
            take_all(b.queues[0])


def test_what_a_prompt_source_raises_comes_out_of_get():
    def requests():
        yield request(0)
        raise RuntimeError("line 12 is not JSON")

    with bench() as b:
        b.start_producer()
        b.queues[0].feed("train", requests())
        with pytest.raises(RuntimeError, match="line 12"):
            take_all(b.queues[0])


def test_silence_has_a_deadline_and_a_name():
    class Silent(ToyEngine):
        def step(self):
            time.sleep(0.05)
            return []

    with bench(step_timeout_s=1.0) as b:
        b.start_producer(Silent())
        b.queues[0].feed("train", (request(i) for i in range(3)))
        with pytest.raises(ProducerError, match=r"waited \d+ s for train sample 0 and vLLM \(process \d+\) made no"):
            b.queues[0].get("train")


def test_a_failing_engine_says_why():
    class Failing(ToyEngine):
        def step(self):
            raise RuntimeError("out of cheese")

    with bench() as b:
        b.start_producer(Failing())
        b.queues[0].feed("train", (request(i) for i in range(3)))
        with pytest.raises(ProducerError, match="RuntimeError: out of cheese"):
            b.queues[0].get("train")


def test_a_new_producer_gets_what_the_dead_one_owed():
    with bench(num_blocks=32) as b:
        lost = threading.Event()
        b.hub.on_producer_lost = lambda reason: lost.set()
        b.start_producer(ToyEngine(delay_s=0.002))
        b.queues[0].feed("train", (request(i) for i in range(120)))
        items = []
        for restarts in range(1, 4):
            for _ in range(20):
                items.append(b.queues[0].get("train"))
                check_rows(items[-1])
                items[-1].release()
            b.kill_producer()
            assert lost.wait(10)
            lost.clear()
            b.start_producer(ToyEngine(delay_s=0.002), restarts)
        items += take_all(b.queues[0])
        assert [item.index for item in items] == list(range(120))
        deadline_s = time.monotonic() + 5
        while b.queues[0].stats().restarts != 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert b.queues[0].stats().restarts == 3


def test_counters_are_those_of_all_producers():
    def made():
        producer = b.queues[0].stats().producer
        return producer.prefill_tokens + producer.decode_tokens

    def wait_for(num_tokens):
        deadline_s = time.monotonic() + 10
        while made() < num_tokens and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert made() == num_tokens

    with bench(num_blocks=32) as b:
        lost = threading.Event()
        b.hub.on_producer_lost = lambda reason: lost.set()
        b.start_producer()
        b.queues[0].feed("train", (request(i) for i in range(10)))
        num_tokens = sum(item.num_rows for item in take_all(b.queues[0]))
        wait_for(num_tokens)
        b.kill_producer()
        assert lost.wait(10)
        b.start_producer(restarts=1)
        b.queues[0].feed("val", (request(i, stream="val") for i in range(10)))
        wait_for(num_tokens + sum(item.num_rows for item in take_all(b.queues[0], "val")))


def test_a_stream_that_is_forgotten_is_in_no_counter():
    with bench(num_blocks=16, max_dropped_share=0.05) as b:
        queue = b.queues[0]
        b.start_producer()
        names = dict.fromkeys(range(0, 200, 2), "refuse me")
        queue.feed("self", (request(i, name=names.get(i), stream="self") for i in range(200)))
        for index in range(150):
            item = queue.get("self")
            assert item.index == index
            assert isinstance(item, Dropped) == (index in names)
            if index % 3 and index not in names:
                item.release()  # the others hold their blocks
            elif index not in names:
                item.spill()
        queue.forget("self")
        stats = queue.stats()
        assert (stats.taken, stats.cut, stats.spilled, stats.dropped, stats.dropped_names) == (0, 0, 0, {}, {})
        assert (stats.wait_s, stats.producer.prefill_tokens, stats.producer.decode_tokens) == (0.0, 0, 0)
        assert (stats.producer.busy_s, stats.producer.free_blocks) == (0.0, 16)
        queue.feed("train", (request(i) for i in range(30)))
        num_rows = sum(item.num_rows for item in take_all(queue))
        deadline_s = time.monotonic() + 10
        while (made := queue.stats().producer).prefill_tokens + made.decode_tokens < num_rows:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert made.prefill_tokens + made.decode_tokens == num_rows
        assert made.busy_s > 0
        assert queue.stats().taken == 30


def test_what_is_left_of_a_stream_has_a_deadline():
    with bench(step_timeout_s=0.5) as b:
        b.start_producer()
        b.queues[0].wait_ready(10)

        def requests():
            yield request(0, stream="self")
            time.sleep(30)

        b.queues[0].feed("self", requests())
        with pytest.raises(ProducerError, match=r"for self sample 1 and the source of its prompts gave none"):
            b.queues[0].forget("self")


def test_a_rank_that_does_not_go_on_is_not_taken_for_vllm(tmp_path):
    with bench(num_blocks=12, world_size=2, step_timeout_s=1.0, tmp_path=tmp_path) as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i) for i in range(100)))

        def take_all_alone():
            while True:
                b.queues[0].get("train").release()

        with pytest.raises(ProducerError, match=r"for train sample \d+ and the arena has no room .* another rank"):
            take_all_alone()


def test_every_rank_gets_every_sample_and_blocks_are_free_when_all_have_let_go(tmp_path):
    with bench(num_blocks=12, world_size=3, tmp_path=tmp_path) as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i) for i in range(5, 105)), start_index=5)
        seen: list[list[int]] = [[], [], []]

        def run(rank):
            for item in take_all(b.queues[rank]):
                seen[rank].append(item.index)
                time.sleep(0.001 * rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert seen == [list(range(5, 105))] * 3


def test_a_rank_that_comes_late_has_missed_nothing(tmp_path):
    with bench(world_size=2, late=1, tmp_path=tmp_path) as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i) for i in range(10)))
        items = take_all(b.queues[0])
        deadline_s = time.monotonic() + 10
        while not b.queues[0].stats().producer.decode_tokens and time.monotonic() < deadline_s:
            time.sleep(0.05)  # counters go to those who are there, and nothing else may be forgotten with them
        b.queues.append(SampleQueue.connect(b.handle, 1, 0))
        assert b.queues[1].wait_ready(5.0).tap == "toy"
        assert [item.token_ids for item in take_all(b.queues[1])] == [item.token_ids for item in items]


def test_the_end_of_a_dead_producer_is_not_taken_for_that_of_the_next():
    with bench() as b:
        lost: list[str] = []
        b.hub.on_producer_lost = lost.append
        b.start_producer()
        b.queues[0].wait_ready(10.0)
        first = b.producer_socket
        b.start_producer(restarts=1)
        attached = threading.Event()
        b.hub.post(attached.set)
        assert attached.wait(10)
        first.shutdown(socket.SHUT_RDWR)  # the hub reads the end of the first when it has the second
        b.queues[0].feed("train", (request(i) for i in range(10)))
        assert [item.index for item in take_all(b.queues[0])] == list(range(10))
        assert not lost


def test_a_rank_that_leaves_ends_the_others(tmp_path):
    with bench(world_size=2, tmp_path=tmp_path) as b:
        b.start_producer()
        time.sleep(0.2)
        b.queues[1].close()
        with pytest.raises(ProducerError, match="rank 1 of the trainer is gone"):
            b.queues[0].get("train")


def test_every_rank_hears_of_the_users_mistake(tmp_path):
    with bench(world_size=2, tmp_path=tmp_path) as b:
        b.hub.fail("with the end of a log", Mistake("data.engine.extra.foo", None, "it is odd", "Leave it out."))
        for queue in b.queues:
            with pytest.raises(ConfigError, match=r"^data.engine.extra.foo = None: it is odd. Leave it out.$"):
                queue.get("train")


def test_soak_of_4000_samples():
    soak(4000, settled=1000, growth=1.05)
