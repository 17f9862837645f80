// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// submitUntilFull submits count batches, without waiting, until there is no room.
func (t *test) submitUntilFull(count int, next func(i int) *driver.Batch) (list []posted) {
	for i := range count {
		b := next(i)
		tag, err := t.host.submitOnce(t.peer, b)
		if errors.Is(err, driver.ErrFull) {
			break
		}
		t.ok(err, "submit")
		list = append(list, posted{tag, b})
	}
	return list
}

// submitPieces cuts two memories into count equal pieces and submits a batch for each, without
// waiting, until there is no room.
func (t *test) submitPieces(op driver.Op, l, r *memory, count int, message bool) []posted {
	n := l.size / uint64(count)
	return t.submitUntilFull(count, func(i int) *driver.Batch {
		b := t.batchOf(op, l, uint64(i)*n, r, uint64(i)*n, n)
		if message {
			b = withMessage(b, []byte{byte(i)})
		}
		return b
	})
}

// awaitAll waits for batches, each of which must have one of the outcomes wanted, and brings the
// models up to date. Nothing may land behind a completion: so where a batch has failed, the model
// gets the bytes that memory holds now. Where that is not possible, or the error is ErrUnproven,
// the bytes are unknown: refill gives those ranges other bytes. sent are the messages that must
// arrive.
func (t *test) awaitAll(what string, list []posted, want ...error) (sent [][]byte, refill func()) {
	var unknown []func()
	for _, p := range list {
		err := t.await(p.tag)
		t.wantErr(err, what, want...)
		if err == nil {
			t.apply(p.b)
			if p.b.Tail != driver.NoTail {
				sent = append(sent, p.b.Notify)
			}
			continue
		}
		for _, d := range p.b.Descs {
			m, off := t.remotes[d.RemoteKey], d.Remote
			if p.b.Op == driver.Read {
				m, off = t.locals[d.LocalKey], d.Local
			}
			if errors.Is(err, driver.ErrUnproven) || !m.readIntoModel(off, d.Len) {
				unknown = append(unknown, func() { m.fill(m.off+off, d.Len) })
			}
		}
	}
	return sent, func() {
		for _, f := range unknown {
			f()
		}
	}
}

// awaitClosed is awaitAll for batches that were in flight at a Close which has returned: their
// completions must be there already.
func (t *test) awaitClosed(list []posted, want ...error) (refill func()) {
	for n := 1; n > 0; {
		n, _ = t.host.poll()
	}
	for _, p := range list {
		if done, _ := t.host.outcome(p.tag); !done {
			t.broken("a tag was in flight behind Close")
		}
	}
	_, refill = t.awaitAll("a tag in flight at Close", list, want...)
	return refill
}

// startHelpers starts goroutines that call Help for batches, in any order and over and over, until
// stop is called. Where help is false there are none.
func (t *test) startHelpers(help bool, list []posted) (stop func()) {
	if !help {
		return func() {}
	}
	quit := make(chan struct{})
	var all sync.WaitGroup
	for g := range 3 {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 1))
			for first := true; first || !closed(quit); first = false {
				for _, i := range random.Perm(len(list)) {
					t.peer.Help(list[i].tag, quit)
				}
			}
		})
	}
	end := sync.OnceFunc(func() { close(quit); all.Wait() })
	t.Cleanup(end)
	return func() {
		t.returns("Help, told to stop", end)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// checkLoad has writes and reads of many lengths under way at once.
func checkLoad(t *test) {
	const slots, slot = 64, 100 << 10
	l, r := t.local(2*slot*slots), t.remote(2*slot*slots)
	lens := []uint64{8, 64, 656, 4096, 20000, 65537, 100 << 10}
	for round := range uint64(4) {
		var list []posted
		for i := range uint64(2 * slots) {
			n := lens[(i/2+round)%uint64(len(lens))]
			b := t.batchOf(bothOps[i%2], l, i*slot, r, i*slot, n)
			list = append(list, t.submit(b))
		}
		t.awaitSuccess("under load", list...)
		t.compare("under load")
		l.refill()
	}
}

// checkFull submits without a Poll until there is no room. After polls there must be room again.
func checkFull(t *test) {
	for _, n := range []uint64{64, 256 << 10} {
		l, r := t.local(n), t.remote(n)
		b := t.batchOfAll(driver.Write, l, r)
		for round := range 2 {
			list := t.submitUntilFull(5000, func(int) *driver.Batch { return b })
			if len(list) == 0 {
				t.Fatalf("round %d: full although nothing is in flight", round)
			}
			t.awaitSuccess("before the backend was full", list...)
		}
		t.move(b)
		t.compare("after the backend was full")
	}
}

// checkNoPoll: while the initiator does not poll, its batches move all bytes, their messages
// arrive, and a revoke finds its proof. Only completions wait for a Poll.
func checkNoPoll(t *test) {
	const count, size = 4, 4 << 20
	l, r := t.local(size), t.remote(size)
	for round := range 3 {
		message := t.can(driver.CanNotify)
		list := t.submitPieces(driver.Write, l, r, count, message)
		var sent [][]byte
		for _, p := range list {
			t.apply(p.b)
			sent = append(sent, p.b.Notify)
		}
		if message && t.wiring != Self { // else to receive would poll
			t.expectMessages(t.far, sent...)
			r.expect("when the messages came, without a call of Poll")
			message = false
		}
		t.until("writes without a call of Poll", r.same)
		t.awaitSuccess("without a call of Poll", list...)
		if message {
			t.expectMessages(t.far, sent...)
		}
		l.refill()
		list = t.submitPieces(driver.Write, l, r, count, false)
		t.ok(t.inTime("revoke memory whose writer does not poll", r.revoke), "revoke")
		r.expectNoMoreLanding("round %d, revoked from a writer that does not poll", round)
		for _, p := range list {
			t.wantErr(t.await(p.tag), "a write to memory that was revoked", nil, driver.ErrRevoked)
		}
		r.expect("when the writes had ended")
		t.drop(r)
		r.reregister()
		t.importMemory(r)
	}
}

// checkCancel cancels batches, with helpers and without. Nothing may land behind a completion, also
// one with an error, and the message of a batch that failed must not arrive.
func checkCancel(t *test) {
	const count, n = 8, 1 << 20
	l, r := t.local(n*count), t.remote(n*count)
	for round := range 8 {
		op, target := bothOps[round%2], r
		if op == driver.Read {
			target = l
		}
		message := op == driver.Write && round%4 == 2 && t.can(driver.CanNotify)
		list := t.submitPieces(op, l, r, count, message)
		stop := t.startHelpers(round >= 4, list)
		var all sync.WaitGroup
		for i := range list { // the last ones first: they have hardly begun
			all.Go(func() { t.peer.Cancel(list[len(list)-1-i].tag) })
		}
		t.returns("Cancel", all.Wait)
		sent, refill := t.awaitAll("a batch that was cancelled", list, nil, driver.ErrAborted)
		refill()
		stop()
		t.expectMessages(t.far, sent...)
		t.makeVisible()
		target.expectNoLanding("behind the completion of a %v that was cancelled", op)
	}
	t.compare("after all that was cancelled")
}

// checkCancelNothing cancels tags that are unknown, finished or another peer's.
func checkCancelNothing(t *test) {
	const n = 4 << 20
	l, r := t.local(n), t.remote(n)
	b := t.batchOfAll(driver.Write, l, r)
	finished := t.submit(b)
	t.awaitSuccess("first", finished)
	other, err := t.host.connect(t.addr, t.h.limit)
	t.ok(err, "connect again")
	var list []posted
	for i := range 6 {
		list = append(list, t.submit(b))
		t.host.peer(other).Cancel(list[i].tag)
		for _, tag := range []uint64{0, 1, 1 << 63, firstTag + 1000, ^uint64(0), finished.tag} {
			t.peer.Cancel(tag)
		}
	}
	t.awaitSuccess("where another peer was asked to cancel", list...)
	t.compare("after nothing was cancelled")
}

// checkDrop drops keys while batches use them: the batches must succeed. Two imports of one token
// have two keys, and dropping one must leave the other.
func checkDrop(t *test) {
	const n = 4 << 20
	l, r := t.local(n), t.remote(n)
	for range 4 {
		first := r.importKey
		t.importMemory(r)
		if r.importKey == first {
			t.Fatalf("two imports of a token have the same key %d", first)
		}
		p := t.submit(t.batchOfAll(driver.Write, l, r))
		t.peer.Drop(r.importKey)
		t.peer.Drop(r.importKey)
		t.awaitSuccess("whose key was dropped", p)
		t.refused("with a key that was dropped", driver.ErrBounds, p.b)
		delete(t.remotes, r.importKey)
		r.importKey = first
		t.move(t.batchOfAll(driver.Read, l, r))
		t.compare("after a key was dropped in flight")
		l.refill()
		t.drop(r)
		t.importMemory(r)
	}
}

// checkHelp calls Help: by one goroutine and by several, with a stop channel that is closed, and
// for tags that have completed or are unknown. Each batch must complete once, messages must keep
// their order, and Help must return.
func checkHelp(t *test) {
	const count, n = 12, 512 << 10
	l, r := t.local(n*count), t.remote(n*count)
	stop := make(chan struct{})
	close(stop)
	for round := range 6 {
		op := bothOps[round%2]
		message := op == driver.Write && t.can(driver.CanNotify)
		list := t.submitPieces(op, l, r, count, message)
		end := t.startHelpers(round >= 3, list)
		var sent [][]byte
		for _, p := range list {
			t.returns("Help", func() {
				t.peer.Help(p.tag, [](<-chan struct{}){nil, stop}[round/2%2])
			})
			t.awaitSuccess("with help", p)
			sent = append(sent, p.b.Notify)
		}
		end()
		if message {
			t.expectMessages(t.far, sent...)
		}
		t.compare("after help in round %d", round)
		for _, p := range append(list, posted{}, posted{tag: 1}, posted{tag: firstTag + 1000},
			posted{tag: ^uint64(0)}) {
			if t.peer.Help(p.tag, nil) {
				t.Errorf("Help with a batch that is done, or unknown, says that it did something")
			}
		}
		l.refill()
	}
}

// checkPeerClose closes a peer with batches in flight. When Close returns they must have completed,
// and nothing may land behind it.
func checkPeerClose(t *test) {
	const count, size = 16, 16 << 20
	l, r := t.local(size), t.remote(size)
	for round := range 4 {
		list := t.submitPieces(driver.Write, l, r, count, false)
		stop := t.startHelpers(round%2 == 1, list)
		t.closeInTime("peer", t.peer.Close)
		stop()
		t.awaitClosed(list, nil, driver.ErrClosed)()
		r.expectNoLanding("behind Peer.Close, round %d", round)
		t.closedPeer("Peer.Close", l, r)
		if lost := t.peer.Lost(); lost != nil {
			t.until("Lost of a peer that was closed", func() bool { return closed(lost) })
		}
		delete(t.remotes, r.importKey)
		t.connect()
		t.importMemory(r)
	}
}

// closedPeer tries what a peer must refuse once it, or its backend, was closed.
func (t *test) closedPeer(after string, l, r *memory) {
	for what, b := range map[string]*driver.Batch{
		"a write":                   batch(driver.Write, desc(l, 0, r, 0, 64)),
		"a message":                 messageAlone([]byte("x")),
		"a write with unknown keys": batch(driver.Write, driver.Desc{Len: 1, LocalKey: 1 << 31}),
	} {
		if b.Check(t.peer.Can()) == nil {
			t.refused(what+" after "+after, driver.ErrClosed, b)
		}
	}
	_, _, err := t.peer.Import(r.token)
	t.wantErr(err, "Import after "+after, driver.ErrClosed)
	t.wantErr(t.inTime("close peer again", t.peer.Close), "close peer again", nil, driver.ErrClosed)
	t.peer.Drop(r.importKey)
}

// checkBackendClose closes a backend with batches in flight, twice, and then calls all methods.
func checkBackendClose(t *test) {
	const count, size = 16, 16 << 20
	l, r, unused := t.local(size), t.far.shared(size), t.local(64)
	t.importMemory(r)
	m := t.host.region(l.reg).mem
	for range 2 {
		t.ok(unused.revoke(), "revoke")
	}
	if one, two := t.local(64), t.local(64); one.key == two.key {
		t.Errorf("two memories have key %d, which was another's that was revoked twice", one.key)
	}
	list := t.submitPieces(driver.Write, l, r, count, false)
	for range 2 {
		t.closeInTime("backend", t.host.b.Close)
	}
	t.awaitClosed(list, nil, driver.ErrClosed)()
	r.expectNoLanding("behind Backend.Close")
	for range 3 {
		n, err := t.host.poll()
		if n != 0 || !errors.Is(err, driver.ErrClosed) {
			t.Errorf("Poll of a closed backend: %d, %v, want 0, %v", n, err, driver.ErrClosed)
		}
	}
	_, err := t.host.b.Register(t.host.region(l.reg).seg)
	t.wantErr(err, "Register after Close", driver.ErrClosed)
	_, err = t.host.connect(t.addr, t.h.limit)
	t.wantErr(err, "Connect after Close", driver.ErrClosed)
	t.closedPeer("Backend.Close", l, r)
	t.returns("calls after Close", func() { // which must not panic
		t.host.b.Caps()
		t.host.b.Addr()
		_, _ = m.AppendToken(nil)
		_ = m.Revoke(ended())
		_, _ = t.host.b.Arm()
		_ = t.host.b.Answer(1, nil)
		_, _ = t.host.b.Receive(make([]driver.Message, 1))
		t.peer.Can()
		t.peer.Conn()
		t.peer.Explain(m.Key(), r.importKey)
		t.peer.Lost()
		t.peer.Help(firstTag, nil)
		t.peer.Cancel(firstTag)
	})
}

// checkTogether makes, from many goroutines at once, all calls that may be made at any time, and
// then closes the backend meanwhile. Each call must succeed before Close begins, and after that
// succeed or return an error of a closed backend.
func checkTogether(t *test) {
	const n = 64 << 10
	seg := t.host.region(t.local(n).reg).seg
	token, late := t.remote(n).token, t.local(n)
	writer := func() func() error {
		l, r := t.local(n), t.remote(n)
		write := t.batchOf(driver.Write, l, 0, r, n/4, n/2)
		read := t.batchOf(driver.Read, l, n/2, r, n/4, n/2)
		return func() error {
			for _, b := range []*driver.Batch{write, read} {
				tag, err := t.host.submit(t.peer, b)
				if err != nil {
					return err
				}
				t.peer.Help(tag, nil)
				if err := t.host.await(tag); err != nil {
					return err
				}
			}
			p, err := t.host.space(l.id).get(guard, n)
			if err == nil && !bytes.Equal(p[:n/2], p[n/2:]) && len(write.Descs) == 1 {
				err = errors.New(testkit.BrokenPromise + "read back: " +
					difference(p[n/2:], p[:n/2]))
			}
			return err
		}
	}
	jobs := map[string]func() error{"writer": writer(), "another writer": writer(),
		"importer": func() error {
			key, _, err := t.peer.Import(token)
			t.peer.Drop(key)
			return err
		},
		"registrar": func() error {
			seg := seg
			seg.Secret = secret()
			m, err := t.host.b.Register(seg)
			if err == nil {
				_, err = m.AppendToken(nil)
				err = errors.Join(err, m.Revoke(context.Background()))
			}
			return err
		},
		"connecter": func() error {
			id, err := t.host.connect(t.addr, t.h.limit)
			if err == nil {
				err = t.host.peer(id).Close()
			}
			if far, ok := t.far.to.(*host); ok { // it must receive the last message
				_, _ = far.receiveOnce(make([]driver.Message, 8))
			} else {
				_, _ = t.far.try(request{Do: "receive", Count: 8, Limit: 1})
			}
			return err
		},
		"revoker": func() error {
			if err := late.revoke(); err != nil {
				return err
			}
			r, err := t.near.try(late.how)
			if err == nil {
				late.reg = r.ID
			}
			return err
		},
		"sleeper": func() error {
			_, err := t.host.b.Arm()
			_, _ = t.host.poll()
			return err
		},
	}
	var all, warmUp sync.WaitGroup // warmUp: until each job has run 12 times, or has ended

	// closing is closed when Close begins, closedNow when it has returned.
	closing, closedNow := make(chan struct{}), make(chan struct{})
	for name, job := range jobs {
		warmUp.Add(1)
		all.Go(func() {
			warm := sync.OnceFunc(warmUp.Done)
			defer warm()
			for i := 0; !closed(closedNow); i++ {
				if i == 12 {
					warm()
				}
				err := job()
				if err != nil && !closed(closing) {
					t.Errorf("%s: %v", name, err)
				} else if err != nil {
					t.wantErr(err, name+" beside Close", driver.ErrClosed, driver.ErrPeerLost,
						driver.ErrBounds)
				}
				if err != nil {
					return
				}
			}
		})
	}
	t.returns("calls from many goroutines", warmUp.Wait)
	close(closing)
	t.closeInTime("backend", t.host.b.Close)
	close(closedNow)
	t.returns("calls beside Close", all.Wait)
}

// disk models the bytes of a memory that would survive a loss of power: those that it held when the
// latest of the syncs that have ended began.
type disk struct {
	mu     sync.Mutex // guards what follows
	begun  [][]byte   // the bytes when each sync that has not ended began
	stable []byte     // the bytes that would survive
}

// checkDurable has durable writes and others under way at once. When a durable one ends, its bytes
// must survive a loss of power.
func checkDurable(t *test) {
	const slots, slot = 6, 70 << 10
	l, r := t.local(slot*slots), t.remote(slot*slots)
	far, ok := t.far.to.(*host)
	var d *disk
	if ok && t.h.Syncs != nil {
		read := func() []byte {
			p, _ := far.space(r.id).get(r.off, r.size)
			return bytes.Clone(p)
		}
		d = &disk{stable: read()}
		t.h.Syncs(far.b, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.begun = append(d.begun, read())
		}, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.stable, d.begun = d.begun[0], d.begun[1:]
		})
	}
	lens := []uint64{1, 656, 4096, 8192 + 7, 64 << 10, 70 << 10}
	for round := range uint64(12) {
		l.refill()
		var list [slots]posted
		for i := range uint64(slots) {
			b := t.batchOf(driver.Write, l, i*slot, r, i*slot, lens[(i+round)%slots])
			if i == 3 && t.can(driver.CanPattern) {
				b = patternBatch(driver.Write, l, r, driver.Pattern{Run: 1000, Count: 30,
					Local:  driver.Side{Base: i * slot, Stride: 1000},
					Remote: driver.Side{Base: i * slot, Stride: 2000}})
			}
			b.Durable = (i+round)%3 != 2
			list[i] = t.submit(b)
			t.apply(b)
		}
		for i, p := range list {
			t.ok(t.await(p.tag), "write %d of round %d", i, round)
			if d == nil || !p.b.Durable {
				continue
			}
			d.mu.Lock()
			got, want := d.stable[i*slot:][:slot], r.model()[i*slot:][:slot]
			if !bytes.Equal(got, want) {
				testkit.ErrorBroken(t, "round %d, write %d: a loss of power would leave other "+
					"bytes: %s", round, i, difference(got, want))
			}
			d.mu.Unlock()
		}
	}
	t.compare("after durable writes")
}

// checkChurn connects, registers and imports over and over; when a check ends, the suite looks for
// what is left behind. It also checks Caps, Addr, FD and Explain.
func checkChurn(t *test) {
	const n = 4096
	caps, addr, fd := t.host.b.Caps(), t.host.b.Addr(), t.host.b.FD()
	l, whole := t.local(n), t.far.shared(4*n)
	open := t.descriptors()
	for range 40 {
		part := whole.registerRange(n, n)
		other, err := t.host.connect(t.addr, t.h.limit)
		t.ok(err, "connect")
		p := t.host.peer(other)
		key, _, err := p.Import(part.token)
		t.ok(err, "import")
		if line := p.Explain(l.key, key); line == "" || bytes.ContainsRune([]byte(line), '\n') {
			t.Errorf("Explain returned %q, want one line", line)
		}
		p.Explain(1<<31, 1<<32-1) // unknown keys: must not panic
		b := batch(driver.Write, driver.Desc{LocalKey: l.key, RemoteKey: key, Len: n})
		tag, err := t.host.submit(p, b)
		t.ok(err, "submit")
		t.ok(t.await(tag), "write")
		t.closeInTime("peer", p.Close)
		if t.can(driver.CanNotify) {
			t.expectLastMessage(t.far)
		}
		t.ok(part.revoke(), "revoke")
		copy(whole.model()[n:], l.model())
		l.refill()
		whole.expect("after a write by a connection that has closed")
	}
	t.until("descriptors of 40 connections that were closed", func() bool {
		return t.descriptors() <= open+8
	})
	for what, wrong := range map[string]bool{
		"Caps must be constant":                 t.host.b.Caps() != caps,
		"Addr must be constant":                 !bytes.Equal(t.host.b.Addr(), addr),
		"Addr has 1 to AddrMax bytes":           len(addr) == 0 || len(addr) > driver.AddrMax,
		"FD must be a descriptor, and constant": fd < 0 || t.host.b.FD() != fd,
		"Name must be lower case": caps.Name == "" ||
			caps.Name != strings.ToLower(caps.Name),
		"DescsMax must be at least 1":         caps.DescsMax < 1,
		"Pairs must not be empty":             caps.Pairs.Local() == 0,
		"RunsMax is over 0 with CanPattern":   caps.RunsMax == 0 && t.can(driver.CanPattern),
		"MessageMax is over 0 with CanNotify": caps.MessageMax == 0 && t.can(driver.CanNotify),
		"Cost.Rate must be over 0":            caps.Cost.Rate <= 0,
	} {
		if wrong {
			t.Errorf("%s: %+v, %q, %d", what, caps, addr, fd)
		}
	}
	for kind := range driver.Kind(4) {
		seg := driver.Segment{Kind: kind, Len: 4096, Addr: 1 << 40}
		if kind == driver.DRAM {
			seg = driver.Segment{Len: 4096, Mem: make([]byte, 4096)}
		}
		if _, err := t.host.b.Register(seg); !caps.Pairs.Local().Has(kind) {
			t.wantErr(err, fmt.Sprintf("register memory of kind %v", kind), driver.ErrNotSupported)
		} else if kind == driver.DRAM {
			seg.Len = 1 << 60
			if _, err := t.host.b.Register(seg); err == nil {
				t.Errorf("register more bytes than there are: no error")
			}
		}
	}
}

// descriptors counts those of this process.
func (t *test) descriptors() int {
	entries, err := os.ReadDir("/proc/self/fd")
	t.ok(err, "count descriptors")
	return len(entries)
}
