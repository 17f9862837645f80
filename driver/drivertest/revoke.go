// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const big = 4 << 20 // bytes of a write that is under way for a while

// checkRevoke revokes a part of memory again and again, and registers it anew: what came with the
// old tokens is of no use, the new one is, and the whole and a part that overlaps keep theirs.
func checkRevoke(t *test) {
	const n = 100 << 10
	l, whole := t.local(4*n), t.remote(4*n)
	r, overlap := whole.registerRange(n, n), whole.registerRange(n+n/2, n)
	t.importMemory(r)
	t.importMemory(overlap)
	var old [][]byte
	for round := range 5 {
		t.move(t.batchOf(driver.Write, l, 0, r, 0, n))
		if round%2 == 0 {
			t.ok(r.revoke(), "revoke")
			r.expect("after a revoke, which makes finished writes visible")
		} else if err := r.revokeAtOnce(); err != nil {
			t.wantErr(err, "revoke with a context that is over", context.Canceled)
		}
		old = append(old, r.token)
		dead := *r
		for _, when := range []string{"when it was revoked", "when the key may be another's"} {
			for _, op := range bothOps {
				for _, size := range []uint64{64, n} {
					b := t.batchOf(op, l, n, &dead, 0, size)
					t.wantErr(t.outcomeOf(b), fmt.Sprintf("%v of %d bytes %s", op, size, when),
						driver.ErrRevoked)
				}
			}
			for _, token := range old {
				_, _, err := t.peer.Import(token)
				t.wantErr(err, "import a token of memory "+when, driver.ErrRevoked)
			}
			if when[5] == 'i' {
				t.ok(r.revoke(), "revoke once more")
				r.reregister()
			}
		}
		l.refill()
		t.move(t.batchOf(driver.Write, l, 0, whole, 0, 2*n))
		t.move(t.batchOf(driver.Write, l, 2*n, overlap, 0, n))
		t.drop(&dead)
		t.importMemory(r)
		t.move(batch(driver.Write, desc(l, 77, r, 99, 1000)))
		t.move(batch(driver.Read, desc(l, n, r, 0, 1000)))
		t.compare("after a revoke of a part")
	}
	began := time.Now()
	for range 300 {
		t.ok(r.revoke(), "revoke idle memory")
		r.reregister()
	}
	if took := time.Since(began); took > max(t.h.limit, 150*t.h.Grace) {
		t.Errorf("300 revokes of idle memory took %v: each waits its grace", took)
	}
}

// attack makes the far side write to new memory of the near side, or read it, until it is revoked.
// It returns when bytes arrive.
func (t *test) attack(op driver.Op, back int, l, r *memory) {
	target := r
	if op == driver.Read {
		target = l
	}
	b := t.batchToNear(op, back, l, r, min(l.size, r.size))
	t.far.must(request{Do: "flood", Peer: back, Batch: b})
	t.until("bytes of the far side", func() bool { return !target.same() })
}

// attackEnds waits until the far side was told that its token is of no use, and all its batches
// have ended.
func (t *test) attackEnds() {
	_, err := t.far.try(request{Do: "end"})
	t.wantErr(err, "batches with a token of a past epoch", driver.ErrRevoked)
}

// checkRevokeUnderWrites revokes memory that is written to, and memory that is read.
func checkRevokeUnderWrites(t *test) {
	back := t.connectBack()
	l := t.far.local(big)
	for round := range 8 {
		r := t.near.shared(big)
		if round%4 == 3 {
			t.attack(driver.Read, back, l, r)
			t.ok(r.revoke(), "revoke memory that is read")
			copyBefore := bytes.Clone(r.model())
			r.refill()
			t.attackEnds()
			copy(l.model(), copyBefore) // what was read was there before, or was not read
			got := l.bytes()
			if !bytes.Equal(got, copyBefore) && bytes.Contains(got, r.model()[big/2:][:64]) {
				t.broken("bytes were read that came behind the revoke")
			}
			l.refill()
			continue
		}
		t.attack(driver.Write, back, l, r)
		t.ok(r.revokeByThree(), "revoke memory under writes")
		r.expectNoMoreLanding("behind a revoke under writes")
		t.attackEnds()
		r.expect("behind a revoke, when the writes had ended")
	}
}

// checkRevokeFrozen stops the writer in the midst of writes, revokes, gives the memory another use
// and lets the writer go on: nothing lands. Half of the memory is ranges, between which the owner's
// program goes on writing.
func checkRevokeFrozen(t *test) {
	back := t.connectBack()
	l := t.far.local(big)
	for round := range 8 {
		var only driver.Ranges
		if round%2 == 1 {
			only = driver.Ranges{{Off: 0, Len: big / 4}, {Off: big / 2, Len: big / 4}}
		}
		r, beside := t.near.sharedRanges(big, only, t.far, back), t.near.shared(4096)
		if r == nil {
			continue // such memory is not for another process
		}
		whole := r.size
		if only != nil {
			r.size = big / 4 // is what the writer names
		}
		t.attack(driver.Write, back, l, r)
		r.size = whole
		t.ok(t.proc.freeze(), "freeze")
		if round%4 < 2 {
			if err := r.revokeAtOnce(); err != nil {
				t.wantErr(err, "revoke with a context that is over", context.Canceled)
			}
		}
		stop := func() {}
		if only != nil {
			stop = t.writesBeside(r.space, guard+big/4, big/4)
		}
		t.ok(r.revokeByThree(), "revoke while the writer stands still")
		stop()
		r.expectNoMoreLanding("behind a revoke while the writer stands still")
		t.ok(t.proc.thaw(), "thaw")
		r.expectUnchanged("when the writer went on")
		t.attackEnds()
		r.expect("behind a revoke, when the writes had ended")
		beside.expect("beside memory that was revoked")
		r.reregister()
		t.far.run(back, t.batchToNear(driver.Write, back, l, r, 4096))
		t.ok(r.revoke(), "revoke")
		copy(r.model(), l.model()[:4096])
		r.expect("after a write with the new token")
	}
}

// writesBeside has the owner's program write a range, and look at what it wrote, until the function
// that it returns is called.
func (t *test) writesBeside(sp *space, off, n uint64) (stop func()) {
	mem, quit, result := t.host.space(sp.id), make(chan struct{}), make(chan error, 1)
	go func() {
		for seed := uint64(1); !closed(quit); seed++ {
			want := pattern(make([]byte, n), seed)
			err := mem.set(off, want)
			got, err2 := mem.get(off, n)
			if err = errors.Join(err, err2); err == nil && !bytes.Equal(got, want) {
				err = errors.New(testkit.BrokenPromise +
					"what the program wrote beside a revoke is lost")
			}
			if err != nil {
				result <- err
				return
			}
		}
		result <- nil
	}()
	return func() {
		close(quit)
		t.ok(<-result, "writes of the program beside ranges that are revoked")
		sp.fill(off, n)
	}
}

// checkRevokeKilled kills the writer in the midst of writes: a dead peer holds nothing up, and
// nothing of it lands, also when its connection has had its last message.
func checkRevokeKilled(t *test) {
	back := t.connectBack()
	l, r := t.far.local(big), t.near.shared(big)
	if t.can(driver.CanNotify) {
		t.sendToNear(back, []byte("before the end"))
	}
	t.attack(driver.Write, back, l, r)
	t.ok(t.proc.kill(), "kill")
	t.ok(r.revoke(), "revoke when the writer is dead")
	r.expectNoMoreLanding("when the writer was killed")
	if t.can(driver.CanNotify) {
		t.expectLastMessage(t.near)
		r.expect("when the connection of a killed writer had ended")
	}
}

// checkRevokeParked stops a goroutine between a check and the act that relies on it while the
// owner revokes, gives the memory another use and another batch of the same writer comes with the
// new token. When the one that stood goes on, nothing of it may land.
func checkRevokeParked(t *test) {
	if t.h.Park == nil {
		t.Log("not run: the harness has no spots")
		return
	}
	const n = 64 << 10
	back := t.connectBack()
	l := t.far.local(n)
	for i, spot := range slices.Concat(t.h.Spots, t.h.OwnerSpots) {
		on, owners := t.far, i >= len(t.h.Spots)
		if owners {
			on = t.near
		}
		for _, again := range []bool{false, true} {
			l.refill()
			r := t.near.shared(n)
			on.must(request{Do: "park", Kind: spot})
			t.far.must(request{Do: "flood", Peer: back,
				Batch: t.batchToNear(driver.Write, back, l, r, n/2)})
			on.must(request{Do: "parked"})
			var proved error
			if owners { // with a piece in hand there is no proof before that has landed
				proved = r.revokeAtOnce()
			} else {
				proved = r.revoke()
				t.ok(proved, "revoke while a goroutine stands at %q of the writer", spot)
			}
			if proved != nil {
				on.must(request{Do: "proceed"})
				t.ok(r.revoke(), "revoke when what stood at %q went on", spot)
			}
			if again { // other memory comes in its place
				r.free()
				r = t.near.shared(n)
			} else {
				r.expectNoMoreLanding("behind a revoke while a goroutine stands at %q", spot)
				r.reregister()
			}
			b := t.batchToNear(driver.Write, back, l, r, 64)
			b.Descs[0].Local, b.Descs[0].Remote = n/2, n/2
			tag := t.far.must(request{Do: "submit", Peer: back, Batch: b}).Tag
			if proved == nil {
				on.must(request{Do: "proceed"})
			}
			t.attackEnds()
			t.far.must(request{Do: "await", Tag: tag})
			t.ok(r.revoke(), "revoke") // makes that write visible
			copy(r.model()[n/2:][:64], l.model()[n/2:])
			r.expect("when what stood at %q went on (memory given back: %v)", spot, again)
		}
	}
}

// checkRenew has fresh pages put under memory, over and over, that reads land in and a peer writes
// to: no byte is lost, and neither keeps a Renew from its turn.
func checkRenew(t *test) {
	const n = 1 << 20
	l, r := t.local(n), t.near.shared(n)
	far := t.remote(n)
	back := -1
	if t.caps.Pairs.Serves(t.host.space(l.id).Segment.Kind, t.host.space(r.id).Segment.Kind) {
		back = t.connectBack()
	}
	for round := range 12 {
		m, write := l, round%2 == 1 && back >= 0
		if write {
			m = r
		}
		seg := t.host.space(m.id).Segment
		if seg.Shared == nil {
			continue
		}
		var b *driver.Batch
		if write {
			from := t.far.local(n)
			b = t.batchToNear(driver.Write, back, from, m, n)
			copy(m.model(), from.model())
		}
		quit, renewed := make(chan struct{}), make(chan error, 1)
		go func() {
			err := seg.Shared.Renew(context.Background(), seg.SharedOff+m.off, m.size)
			for !closed(quit) && err == nil {
				err = seg.Shared.Renew(context.Background(), seg.SharedOff+m.off, m.size)
			}
			renewed <- err
		}()
		if write {
			t.far.run(back, b)
		} else {
			t.move(t.batchOfAll(driver.Read, l, far))
		}
		close(quit)
		if err := <-renewed; err != nil && !errors.Is(err, driver.ErrBusy) {
			t.Errorf("Renew: %v", err)
		}
		if write {
			t.ok(m.revoke(), "revoke") // makes the write visible
			m.reregister()
		}
		m.expect("beside a Renew, round %d", round)
		far.refill()
	}
}

// checkTokens looks at the form of tokens, and shows the far side such as are cut, altered, longer
// or another backend's.
func checkTokens(t *test) {
	const n = 5000
	l, r := t.local(n), t.remote(n)
	m := t.host.region(l.reg)
	prefixed, err := m.mem.AppendToken([]byte("prefix"))
	if err != nil || !bytes.HasPrefix(prefixed, append([]byte("prefix"), m.seg.Secret[:]...)) ||
		len(prefixed) > 6+driver.TokenMax || bytes.Contains(t.host.b.Addr(), m.seg.Secret[:]) {
		t.Errorf("a token has at most %d bytes and begins with the secret, which Addr lacks: "+
			"%x (%v)", driver.TokenMax, prefixed, err)
	}
	keys := map[uint32]bool{}
	for range 20 {
		part := r.registerRange(7, 100)
		if keys[part.key] || bytes.Equal(part.token, r.token) {
			t.Errorf("key %d or token %x is of two memories", part.key, part.token)
		}
		keys[part.key] = true
	}
	bad := func(what string, token []byte, want ...error) {
		key, _, err := t.peer.Import(token)
		t.wantErr(err, "import a token "+what, want...)
		if err == nil {
			t.peer.Drop(key)
		}
	}
	for i := range r.token {
		bad(fmt.Sprintf("cut to %d of %d bytes", i, len(r.token)), r.token[:i:i],
			driver.ErrBadToken)
	}
	for i := range 8 * len(r.token) {
		forged := bytes.Clone(r.token)
		forged[i/8] ^= 1 << (i % 8)
		bad(fmt.Sprintf("with bit %d of byte %d turned", i%8, i/8), forged, driver.ErrBadToken,
			driver.ErrRevoked)
	}
	for _, more := range [][]byte{{0}, make([]byte, 1000), make([]byte, 1<<16)} {
		bad("with more behind it", append(bytes.Clone(r.token), more...), driver.ErrBadToken)
		bad("of nonsense", more, driver.ErrBadToken)
	}
	gone := t.near.local(100)
	t.ok(gone.revoke(), "revoke")
	_, err = t.host.region(gone.reg).mem.AppendToken(nil)
	t.wantErr(err, "a token of memory that was revoked", driver.ErrClosed)
	stranger := &side{t, "other", t.open("other")}
	for range 3 {
		bad("of another backend", stranger.shared(n).token, driver.ErrBadToken)
		t.far.shared(n)
	}
	t.move(t.batchOfAll(driver.Write, l, r))
	t.compare("after bad tokens")
}

// storm has goroutines write to many leases, short writes above all, until each is refused.
func (h *host) storm(q *request) error {
	p, local := h.peer(q.Peer), h.region(q.ID).mem.Key()
	var keys []uint32
	for _, token := range q.Tokens {
		key, _, err := p.Import(token)
		if err != nil {
			return fmt.Errorf("import: %w", err)
		}
		keys = append(keys, key)
	}
	h.begin(func(task *task) {
		// A thread for each: one that loses its processor between a check and its act is the point.
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(len(keys) + 2))
		var refused, lasting sync.WaitGroup
		over := make(chan struct{}) // the writers were refused whose leases do not last
		errs := make([]error, len(keys))
		for i, key := range keys {
			all, end := &refused, task.stop
			if leaseLasts(i) {
				all, end = &lasting, over
			}
			all.Go(func() { errs[i] = h.writeToLease(end, p, i, key, local, q.Len) })
		}
		refused.Wait()
		close(over)
		lasting.Wait()
		task.err = errors.Join(errs...)
	})
	return nil
}

// writeToLease writes to one lease of n bytes until that fails or end is closed. A lease that lasts
// takes a write of all its bytes then: whatever was under way while the process stood still, it
// goes on.
func (h *host) writeToLease(end <-chan struct{}, p driver.Peer, number int, key, local uint32,
	n uint64) error {
	defer p.Drop(key)
	var ignored error
	if leaseLasts(number) {
		ignored = driver.ErrRevoked // cuda takes a whole block away from a process that stood still
	}
	err := h.submitUntil(p, end, 4, false, ignored, func(seq uint64) *driver.Batch {
		seq += uint64(number)
		size := []uint64{8, 64, 64, 64, 656, n}[seq%6]
		at := seq * 977 % (n - size + 1)
		b := batch(bothOps[min(1, seq%16/15)], driver.Desc{Local: at, Remote: at, Len: size,
			LocalKey: local, RemoteKey: key})
		if b.Op == driver.Read {
			b.Descs[0].Local += n
		}
		return b
	})
	if !leaseLasts(number) {
		if errors.Is(err, driver.ErrRevoked) {
			return nil
		}
		return errors.Join(fmt.Errorf("writer %d was not refused", number), err)
	}
	if err == nil || errors.Is(err, driver.ErrRevoked) {
		var tag uint64
		whole := batch(driver.Write, driver.Desc{Len: n, LocalKey: local, RemoteKey: key})
		if tag, err = h.submit(p, whole); err == nil {
			err = h.await(tag)
		}
	}
	return err
}
