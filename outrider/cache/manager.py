"""CacheManager: allocates, shares and frees the cache pages of running requests, in every group of layers.

Pages are allocated by the upper bound of a request's length, but dropped and published by its settled length, which
results have confirmed. A step in flight may accept fewer drafts than the bound assumes, and then still reads pages that
the bound would have dropped. The manager uses no tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from outrider.cache.checkpoints import Checkpoints, StateProgress
from outrider.cache.groups import CacheLayout, Group
from outrider.cache.kinds import Capacity
from outrider.cache.known_states import KnownStates
from outrider.cache.lookup import NO_PROMISES, Horizon, PrefixLookup
from outrider.cache.pages import PagePool
from outrider.cache.promises import Promises
from outrider.core import NULL_PAGE, Bound, CheckpointWrite, Limits, PageChanges, PageWrite, Settled, StepResult
from outrider.core.feature_parts import ResultPart
from outrider.core.input_part import NO_INPUTS, InputParts

LEAST_SHARED = 256  # tokens of a common beginning whose pages are worth reading once for several requests
FEWEST_SHARERS = 4


@dataclass(slots=True)
class RequestPages:
    """One running request's pages. Columns before `first` have been dropped and hold the null page."""

    row: int
    columns: list[list[int]]  # per group, page per column
    first: list[int]  # per group, first column held
    published: list[int]  # per group, columns published
    promised: int  # tokens up to which full pages are published, promised or another request's
    is_mixed: bool = False  # the weights have changed since the first page: none of the pages is for others
    is_sharer: bool = False  # began from pages that another request held, for hundreds of tokens


@dataclass(frozen=True, slots=True)
class Start:
    """The result of looking up a request for admission: its cached prefix, and the pages it still needs."""

    token_ids: Sequence[int]
    num_queried: int  # tokens that were looked up
    hit: int  # tokens that cached pages provide
    num_pages: int  # most free pages that the request needs for all known tokens and one more
    horizon: Horizon = NO_PROMISES  # promises that the hit may use
    state_pages: list[int] = field(default_factory=list)  # pages of the recurrent state after the hit
    must_wait: bool = False  # other requests are computing more of its beginning, for a later step
    branch: int = 0  # boundary after which the request should keep its state for others; 0 for none
    resume_points: Collection[int] = ()  # see `InputPart.resume_points`


@dataclass(slots=True)
class CacheStats(ResultPart):
    queried_tokens: int = 0
    hit_tokens: int = 0


class CacheManager:
    outlives_sleep = False  # whether pages may be found that were computed before the device's memory was freed

    def __init__(self, layout: CacheLayout, pool: PagePool, limits: Limits, *, enable_prefix_caching: bool = True,
                 lookahead: int = 0) -> None:
        assert lookahead <= limits.max_lookahead, "capacities know of no slots beyond these"
        self.layout = layout
        self.groups: tuple[Group, ...] = layout.groups
        self.capacities: list[Capacity] = [g.kind.capacity(limits) for g in self.groups]
        self.pool = pool
        self.limits = limits
        self.lookahead = lookahead  # slots past the bound that a drafter writes
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = CacheStats()
        self.states = KnownStates(layout.recurrent, len(self.groups), self.pool)
        self.checkpoints = Checkpoints(self.states, len(self.groups), self.pool, limits)
        self.promises = Promises(self.pool)
        self.lookup = PrefixLookup(layout, self.pool, self.checkpoints, self.promises, has_lookahead=lookahead > 0)
        self.takes_checkpoints = enable_prefix_caching and bool(layout.recurrent.layers)
        self._requests: dict[int, RequestPages] = {}
        self._num_sharers = 0
        self._table_writes: list[PageWrite] = []  # since the last `take_changes`
        # Pages freed first are evicted first, and a drafter's pages are the least missed.
        self._freed_in_order = sorted(self.groups, key=lambda group: group.is_target)
        self._smallest_page = min(g.page_tokens for g in self.groups)
        self._dropping = [g for g in self.groups if g.kind.next_drop(0) <= limits.max_len]

    def mark_all_unclean(self) -> None:
        """Clear every page before its next use, because steps of an earlier cache may have written to it."""
        self.pool.mark_unclean(range(1, self.pool.num_pages))

    # Admission

    def find_start(self, request_id: int, token_ids: Sequence[int], keys: tuple[str, ...] = (), *,
                   use_prefix: bool = True, inputs: InputParts = NO_INPUTS, step: int | None = None) -> Start:
        """Look up the longest cached prefix of a request. `keys`: salt and other values that must be equal for pages to
        be shared. A hit ends where `inputs` allow it. `step`: the step of the batch that is being made, if the request
        may share pages that this step and steps in flight are still writing; None if it may not. The hashes of the
        request's tokens are kept until `forget`."""
        self.lookup.open(request_id, keys, inputs)
        fresh = self.pages_to_start(len(token_ids) + 1)
        if not (self.enable_prefix_caching and use_prefix):
            return Start(token_ids, 0, 0, fresh)
        horizon = self.lookup.horizon(step)
        hit = self.lookup.longest(request_id, token_ids, inputs, horizon)
        must_wait, branch = self.lookup.find_common(request_id, token_ids, inputs, step, hit)
        state = self.lookup.find_state_after(request_id, token_ids, hit, horizon)
        restoring, needed = self.states.pages_to_restore(state), fresh
        if restoring or fresh > self._num_available:  # otherwise there is room without counting shared pages
            needed = self._pages_beside(request_id, token_ids, hit, horizon) + restoring
        if restoring and needed > self._num_available:
            hit, needed, state = 0, fresh, []  # restoring would hold pages that the request itself needs
        return Start(token_ids, len(token_ids), hit, needed, horizon, state, must_wait, branch,
                     inputs.resume_points() if inputs else ())

    def can_start(self, start: Start) -> bool:
        """Whether the pool has room for all known tokens and one more, counting pages that a hit shares."""
        return start.num_pages <= self._num_available

    def admit(self, request_id: int, row: int, start: Start) -> int:
        """Start holding pages for a request; returns how many of its tokens a prefix hit provides."""
        assert request_id not in self._requests, f"request {request_id} is admitted twice"
        self.stats.queried_tokens += start.num_queried
        self.stats.hit_tokens += start.hit
        pages = RequestPages(row, [], [], [], start.hit)
        for group in self.groups:
            self._hold_hit(request_id, pages, group, start)
        self._num_sharers += pages.is_sharer
        self.checkpoints.admit(request_id, row, len(start.token_ids), start.resume_points)
        digest_at = self.lookup.digest_at(request_id, start.token_ids)
        if start.state_pages:
            self.states.restore(request_id, start.state_pages)
            if self.states.find(digest_at(start.hit)) is None:
                self.promises.share_state(request_id, digest_at(start.hit))
        if start.branch:
            self.checkpoints.ask(request_id, start.branch, digest_at(start.branch))
        self._requests[request_id] = pages
        return start.hit

    def restored(self, request_id: int) -> list[int]:
        """Return the pages of the recurrent state that an admitted request begins from. Valid until the batch is
        made."""
        return self.states.restored(request_id)

    def check_fits(self, tokens: int) -> None:
        """Refuse a request that may grow to more tokens than the whole pool holds."""
        needed = self.pages_to_start(tokens)
        if needed > self.pool.num_usable:
            raise ValueError(
                f"the request may need {needed} pages ({tokens} tokens) and the pool has {self.pool.num_usable}: "
                "lower max_tokens, or give the cache more memory"
            )

    def pages_to_start(self, tokens: int) -> int:
        tokens = min(tokens + self.lookahead, self.limits.max_len)
        return sum(group.kind.pages_to_start(tokens, self.limits) for group in self.groups)

    # Growth

    def reserve(self, request_id: int, bound: Bound) -> bool:
        """Allocate pages in every group for a request of length `bound`, and for the tokens that a drafter writes
        ahead. Returns False, with nothing allocated, if there are too few free pages."""
        pages = self._requests[request_id]
        tokens = min(bound.at_most + self.lookahead, self.limits.max_len)
        missing = [(group.index, count) for group in self.groups
                   if (count := -(-tokens // group.page_tokens) - len(pages.columns[group.index])) > 0]
        needed = sum([count for _, count in missing])
        if needed > self.pool.num_free and not self.checkpoints.make_room(needed):
            return False
        for group, count in missing:
            self._extend(pages, group, count)
        return True

    def covered(self, request_id: int) -> int:
        """Return how many tokens the request's pages have room for, in every group."""
        columns = self._requests[request_id].columns
        return min([len(columns[g.index]) * g.page_tokens for g in self.groups])

    def take_changes(self) -> PageChanges:
        """Return the changes of pages since the last call, which the device makes before the next step."""
        changes = self.pool.take_changes()
        changes.table_writes, self._table_writes = self._table_writes, []
        self.states.end_restoring()
        return changes

    def grant_checkpoints(self, step: int, progress: dict[int, StateProgress]) -> list[CheckpointWrite]:
        """Return the checkpoints that a step may write, with their pages, in the order of its requests. Called just
        before the batch is made: checkpoints get pages that no running request needs."""
        grant = self.checkpoints.grant
        progress = {each: own for each, own in progress.items() if not self._requests[each].is_mixed}
        writes = [write for request_id, own in progress.items() for write in grant(step, request_id, own)]
        for request_id, own in progress.items() if writes else ():
            digest_at, promised = self.lookup.digest_at(request_id, ()), self._requests[request_id].promised
            for checkpoint in self.checkpoints.sure_to_be_kept(request_id, own):
                if checkpoint.boundary <= promised:  # its tokens are hashed
                    self.promises.add_state(step, checkpoint, digest_at(checkpoint.boundary))
        return writes

    def promise(self, step: int, request_id: int, token_ids: Sequence[int], end: int) -> None:
        """Let other requests begin from the pages that a step fills with known tokens of this request, before the
        result of the step has come. end: computed tokens of the request after the step."""
        pages = self._requests[request_id]
        if pages.is_mixed:
            return
        if not self.enable_prefix_caching or end // self._smallest_page == pages.promised // self._smallest_page:
            return
        for group in self.groups:
            full = end // group.page_tokens
            digests = self.lookup.digests(request_id, group.page_tokens, token_ids, full)
            columns = pages.columns[group.index]
            for column in range(max(pages.promised // group.page_tokens, pages.first[group.index]), full):
                content = self.lookup.content(request_id, group, column, token_ids)
                self.promises.add_page(step, request_id, (group.index, digests[column]), columns[column], content)
        pages.promised = end

    @property
    def has_orders(self) -> bool:
        """Whether the cache needs a batch even if no request does: to fold accepted drafts of ended requests."""
        return self.checkpoints.has_folds

    def take_folds(self, step: int) -> list[CheckpointWrite]:
        return self.checkpoints.take_folds(step)

    # Settling

    def settle(self, request_id: int, settled: Settled, token_ids: Sequence[int]) -> int:
        """Let other requests find the pages that are full, and free pages that no query can see any more. Both are
        decided by the settled length, which results have confirmed. Returns the settled length at which the next call
        has something to do."""
        pages, length = self._requests[request_id], settled.at_least
        if self.enable_prefix_caching and not pages.is_mixed:
            for group in self.groups:
                if (full := length // group.page_tokens) > pages.published[group.index]:
                    self._publish(request_id, pages, group, full, token_ids)
        for group in self._dropping:
            if group.kind.first_needed(length) > pages.first[group.index]:
                self._drop(pages, group, length)
        return self.next_event(settled)

    def next_event(self, settled: Settled) -> int:
        """Return the next settled length at which a page becomes full or leaves an attention window."""
        following = (settled.at_least // self._smallest_page + 1) * self._smallest_page
        for group in self._dropping:
            drop = group.kind.next_drop(settled.at_least)
            if drop < following:
                following = drop
        return following

    def settle_checkpoints(self, step: int, written: Sequence[int], tokens_of: Callable[[int], Sequence[int]],
                           failed: Collection[int] = ()) -> None:
        """Publish, keep or drop checkpoints after a step has reported which it wrote. `tokens_of(request)`: its known
        tokens after that step or later. `failed`: requests whose values are not finite."""
        if self.takes_checkpoints:
            self.checkpoints.settle(step, written, lambda request_id, boundary: self.lookup.digest_at(
                request_id, tokens_of(request_id))(boundary), failed)

    def settle_promises(self, step: int, failed: Collection[int], written: Collection[int]) -> set[int]:
        """Publish the pages that a finished step has filled. failed: requests with values that are not finite.
        written: ids of the checkpoints that the step wrote. Returns the requests to restart, because they began from
        pages of a failed request or from a checkpoint that was not written."""
        return self.promises.settle(step, failed, written)

    def settle_moves(self, result: StepResult) -> None:
        """Process a step's report of pages that were copied from or to other storage. Without such storage this does
        nothing."""

    def forget_unsettled(self, changes: Sequence[PageChanges]) -> None:
        """Called after a failed step, when no request has a row any more. The step and later ones may have written any
        bytes, so only pages published before the step stay. `changes`: the changes of pages that these steps were to
        make."""
        self.promises.erase_all()
        self.checkpoints.drop_open()
        self.pool.lose_changes([*changes, self.take_changes()])

    def forget_all(self) -> None:
        """Forget all pages and states, because their content is about to be lost. Called when no request has a row and
        no step is in flight."""
        self.forget_unsettled(())
        emptied = self.pool.forget_cached()
        assert emptied, "a page is known by its content, and nothing should hold one"

    def use_weights(self, version: int) -> None:
        """Begin a new version of the weights: pages of older versions can no longer be found. Called when no step is in
        flight. Running requests go on with the pages that they hold, but publish none any more."""
        self.checkpoints.drop_open()
        self.pool.forget_all()
        for pages in self._requests.values():
            pages.is_mixed = True
        self.lookup.use_weights(version)

    def forget_cached(self) -> bool:
        """Forget pages that no request holds. Returns whether no page can be found any more."""
        return self.pool.forget_cached()

    def retire(self, request_id: int, token_ids: Sequence[int], settled: Settled, folded: int, *,
               is_exact: bool) -> None:
        """Publish the checkpoints that other requests can begin from. Called before `free`."""
        if self.takes_checkpoints and not self._requests[request_id].is_mixed:
            digest_at = self.lookup.digest_at(request_id, token_ids)
            self.checkpoints.retire(request_id, digest_at, len(token_ids), settled.at_least, folded, is_exact=is_exact)

    def free(self, request_id: int) -> None:
        pages = self._requests.pop(request_id)
        self._num_sharers -= pages.is_sharer
        self.promises.leave(request_id)
        self.checkpoints.free(request_id)
        self.states.release(request_id)
        for group in self._freed_in_order:
            columns, first = pages.columns[group.index], pages.first[group.index]
            for page in reversed(columns[first:]):  # tails are evicted first
                self.pool.free(page)

    def forget(self, request_id: int) -> None:
        """Drop the hashes of a request that has ended and holds no pages."""
        assert request_id not in self._requests, f"request {request_id} is forgotten while it holds pages"
        self.lookup.forget(request_id)

    # Looking

    @property
    def shares_pages(self) -> bool:
        """Whether enough running requests hold the same pages for attention to read them once for several of them."""
        return self._num_sharers >= FEWEST_SHARERS

    def usage(self) -> float:
        return 1 - self.pool.num_free / self.pool.num_usable

    def usage_by_group(self) -> list[float]:
        """Return the share of the pool's pages that requests hold in each group. May be called from another thread."""
        held: list[set[int]] = [set() for _ in self.groups]
        for pages in list(self._requests.values()):
            for own, columns in zip(held, pages.columns, strict=True):
                own.update(columns)
        return [len(own - {NULL_PAGE}) / self.pool.num_usable for own in held]

    def check_integrity(self) -> None:
        """Assert that every page is free, cached or owned, exactly once, and that no request holds more than its
        capacity."""
        held: dict[int, int] = {}
        owner_group: dict[int, int] = {}
        for pages in self._requests.values():
            for group, cap in zip(self.groups, self.capacities, strict=True):
                columns, first = pages.columns[group.index], pages.first[group.index]
                assert len(columns) <= cap.table_width, f"group {group.index}: row wider than its page table"
                assert len(columns) - first <= cap.max_pages, f"group {group.index}: more pages than capacity"
                assert all(p == NULL_PAGE for p in columns[:first]), "a dropped column still names a page"
                for page in columns[first:]:
                    held[page] = held.get(page, 0) + 1
                    assert owner_group.setdefault(page, group.index) == group.index, f"page {page} is in two groups"
        for page in self.promises.held():
            held[page] = held.get(page, 0) + 1
        for page in [*self.checkpoints.held(), *self.states.held()]:
            held[page] = held.get(page, 0) + 1
            assert page not in owner_group, f"page {page} is a group's and a checkpoint's"
        self.checkpoints.check_integrity()
        self.promises.check_integrity(self._requests)
        self.pool.check(held)

    # Inside

    @property
    def _num_available(self) -> int:
        """Return the number of free pages, plus pages of unpublished checkpoints, which can be dropped."""
        return self.pool.num_free + self.checkpoints.num_droppable

    def _pages_beside(self, request_id: int, token_ids: Sequence[int], hit: int, horizon: Horizon) -> int:
        """Return the number of free pages needed for all known tokens and one more, without pages of the prefix hit
        that other requests hold.

        A page of the hit that no request holds counts like a new page, because holding it makes one free page less."""
        needed = self.pages_to_start(len(token_ids) + 1)
        for group in self.groups:
            cached = self.lookup.cached_last(request_id, token_ids, group, hit, horizon)
            needed -= sum(self.pool.is_held(page) for page in cached.values())
        return needed

    def _hold_hit(self, request_id: int, pages: RequestPages, group: Group, start: Start) -> None:
        hit, count = start.hit, start.hit // group.page_tokens
        held = self.lookup.cached_last(request_id, start.token_ids, group, hit, start.horizon)
        first = count - len(held)
        assert not group.is_target or first <= group.kind.first_needed(hit), "a hit names a page that is not cached"
        if hit >= LEAST_SHARED and first == 0:
            pages.is_sharer |= self.pool.is_held(next(iter(held.values())))
        columns = [NULL_PAGE] * first + self.pool.hold_all(held.values())
        if self.promises:
            for key in held:
                self.promises.share_page(request_id, key)
        pages.columns.append(columns)
        pages.first.append(first)
        pages.published.append(count)
        if columns:
            self._table_writes.append(PageWrite(group.index, pages.row, 0, list(columns)))

    def _extend(self, pages: RequestPages, group: int, count: int) -> None:
        columns = pages.columns[group]
        fresh = [self.pool.allocate(group) for _ in range(count)]
        self._table_writes.append(PageWrite(group, pages.row, len(columns), fresh))
        columns += fresh

    def _publish(self, request_id: int, pages: RequestPages, group: Group, full: int, token_ids: Sequence[int]) -> None:
        """Publish the first `full` pages of a group, except those that were published before or have been dropped."""
        index = group.index
        digests, columns = self.lookup.digests(request_id, group.page_tokens, token_ids, full), pages.columns[index]
        for column in range(max(pages.published[index], pages.first[index]), full):
            content = self.lookup.content(request_id, group, column, token_ids)
            self.pool.publish(columns[column], (index, digests[column]), content)
        pages.published[index] = full

    def _drop(self, pages: RequestPages, group: Group, settled: int) -> None:
        columns, first = pages.columns[group.index], pages.first[group.index]
        needed = min(group.kind.first_needed(settled), len(columns))
        num_dropped = needed - first
        if num_dropped <= 0:
            return
        for page in reversed(columns[first:needed]):  # the pool gives them out again in their order
            self.pool.free(page)
        nothing = [NULL_PAGE] * num_dropped
        columns[first:needed] = nothing
        self._table_writes.append(PageWrite(group.index, pages.row, first, nothing))
        pages.first[group.index] = needed
