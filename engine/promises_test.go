// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// runLength is how long a run of promises under faults is.
type runLength struct {
	actions int // of each worker; 0: as many as there is time for
	time    time.Duration
}

// TestPromisesUnderFaults has writers, readers, leases, aborts and closes at random over
// a backend that loses, delays, fails and flaps, and holds the engine to what it promises. The soak
// goes over other backends, too.
func TestPromisesUnderFaults(t *testing.T) {
	for _, seed := range []uint64{1, 2, 3} {
		testkit.RunInVirtualTime(t, fmt.Sprint("mem ", seed), func(t *testing.T) {
			promisesUnderFaults(t, promisesBackends["mem"], seed, runLength{actions: 300})
		})
	}
}

func promisesUnderFaults(t *testing.T, open func() (driver.Backend, error), seed uint64,
	long runLength) {
	t.Helper()
	p := keepPromises(t, open, rulesOf(seed), seed, long)
	for _, what := range p.broken {
		testkit.ErrorBroken(t, "%s", what)
	}
	t.Logf("seed %d: %d actions: %d succeeded, %d failed, %d aborted, %d revoked, %d "+
		"connections, %d messages; faults %v", seed, p.actions, p.succeeded, p.failed,
		p.aborted, p.revoked, p.connections, len(p.heard), p.hits)
	if p.succeeded == 0 || p.failed == 0 || p.aborted == 0 || p.revoked == 0 {
		t.Error("the run has not tried what it should")
	}
}

// TestBrokenPromisesAreFound proves that the run can fail.
func TestBrokenPromisesAreFound(t *testing.T) {
	if testkit.RaceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for name, rules := range map[string][]fault.Rule{
		"corrupt": {{On: fault.Write, Chance: 0.2, Do: fault.BreakCorrupt()}},
		"late write": {{On: fault.Write, Chance: 0.3, Do: fault.Swallow()},
			{On: fault.Write, Do: fault.BreakLateWrite(time.Millisecond)}},
		"late read": {{On: fault.Read, Chance: 0.3, Do: fault.Swallow()},
			{On: fault.Read, Do: fault.BreakLateWrite(time.Millisecond)}},
		"early":     {{On: fault.Write, Chance: 0.3, Do: fault.BreakEarly(3 * time.Millisecond)}},
		"duplicate": {{On: fault.Message, Chance: 0.3, Do: fault.BreakDuplicate()}},
	} {
		testkit.RunInVirtualTime(t, name, func(t *testing.T) {
			p := keepPromises(t, promisesBackends["mem"], rules, 1, runLength{actions: 300})
			if len(p.broken) == 0 {
				t.Error("nothing was noticed")
			}
		})
	}
}

var promisesBackends = map[string]func() (driver.Backend, error){
	"mem": func() (driver.Backend, error) { return mem.New(mem.Config{}) },
	"shm": func() (driver.Backend, error) { return shm.New(shm.Config{}) },
	"tcp": func() (driver.Backend, error) {
		return tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	},
}

// rulesOf makes rules within the contract that differ from seed to seed.
func rulesOf(seed uint64) []fault.Rule {
	r := rand.New(rand.NewPCG(seed, 1))
	us := func(most int) time.Duration { return time.Duration(1+r.IntN(most)) * time.Microsecond }
	p := func(most float64) float64 { return most * (0.1 + 0.9*r.Float64()) }
	return []fault.Rule{
		{On: fault.Batch, Chance: p(0.5), Do: fault.Delay(us(500), us(500))},
		{On: fault.Write, Chance: p(0.5), Do: fault.Late(us(300), us(300))},
		{On: fault.Read, Chance: p(0.5), Do: fault.Delay(us(500), us(500))},
		{On: fault.Write, Chance: p(0.01), Do: fault.Drop()},
		{On: fault.Batch, Chance: p(0.01), Do: fault.Swallow()},
		{On: fault.Batch, Chance: p(0.02), Do: fault.Fail(driver.ErrPeerLost)},
		{On: fault.Batch, Chance: p(0.01), Do: fault.Refuse(driver.ErrRevoked)},
		{On: fault.Batch, Every: 100 + uint64(r.IntN(400)), Do: fault.Stall(us(3000))},
		{On: fault.Batch, Every: 500 + uint64(r.IntN(500)), Do: fault.Flap(us(5000))},
		{On: fault.Message, Chance: p(0.5), Do: fault.Late(us(500), us(500))},
	}
}

const (
	promisesWorkers = 4
	slotBytes       = 128 << 10
)

// promises is one run. Each worker has a slot of either region to itself.
type promises struct {
	t      *testing.T
	a, b   *engine.Engine
	src    *engine.Region
	dst    *engine.Region
	long   runLength
	end    time.Time // if the time is what ends it
	rules  []fault.Rule
	seed   uint64
	leased sync.Map

	mu                                                        sync.Mutex
	broken                                                    []string
	actions, succeeded, failed, aborted, revoked, connections int
	hits                                                      []uint64
	heard                                                     map[uint64]int // messages by number
	sent                                                      map[uint64]bool
}

func keepPromises(t *testing.T, open func() (driver.Backend, error), rules []fault.Rule,
	seed uint64, long runLength) *promises {
	t.Helper()
	testkit.CheckLeaks(t, hostmem.InUse)
	p := &promises{t: t, rules: rules, seed: seed, long: long, heard: map[uint64]int{},
		sent: map[uint64]bool{}}
	var wrapped driver.Backend
	p.a, wrapped = p.open("a", open)
	p.b, _ = p.open("b", open)
	p.src, p.dst = p.register(p.a, "src"), p.register(p.b, "dst")
	p.end = time.Now().Add(long.time)
	listening, stop := make(chan struct{}), make(chan struct{})
	go p.listen(listening, stop)
	var workers sync.WaitGroup
	for i := range promisesWorkers {
		workers.Go(func() {
			(&promiser{promises: p, slot: uint64(i), rng: rand.New(rand.NewPCG(seed, uint64(i)))}).
				work()
		})
	}
	workers.Wait()
	p.hits = wrapped.(*fault.Backend).Fired()
	if s := p.a.Stats(); s.Posted != 0 || s.Peers != 0 {
		p.breaks("at the end %d transfers are posted to %d peers", s.Posted, s.Peers)
	} else if s.Stray != 0 {
		p.breaks("%d completions that nobody waited for", s.Stray)
	}
	if len(p.broken) == 0 {
		p.awaitMessages()
	}
	close(stop)
	<-listening
	return p
}

func (p *promises) open(name string, open func() (driver.Backend, error)) (*engine.Engine,
	driver.Backend) {
	p.t.Helper()
	b, err := open()
	if err == nil {
		b, err = fault.Wrap(b, p.seed, p.rules...)
	}
	require.NoError(p.t, err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b},
		Schedule:        &engine.Schedule{BytesInFlight: slotBytes, PieceBytes: slotBytes / 4},
		TransferTimeout: 100 * time.Millisecond, AbortGrace: 10 * time.Second,
		Spin: testkit.Spin()})
	require.NoError(p.t, err)
	p.t.Cleanup(func() {
		if err := e.Close(); err != nil {
			p.t.Errorf("close %s: %v", name, err)
		}
	})
	return e, b
}

func (p *promises) register(e *engine.Engine, name string) *engine.Region {
	p.t.Helper()
	m, err := e.Alloc(promisesWorkers*slotBytes, engine.AllocOptions{Purpose: "test"})
	require.NoError(p.t, err)
	p.t.Cleanup(func() { _ = m.Close() })
	r, err := e.Register(name, m.Segment())
	require.NoError(p.t, err)
	return r
}

// breaks notes a promise that was not kept.
func (p *promises) breaks(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.broken) < 20 {
		p.broken = append(p.broken, fmt.Sprintf(format, args...))
	}
}

func (p *promises) note(n *int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	*n++
}

// listen counts what the owner hears.
func (p *promises) listen(done, stop chan struct{}) {
	defer close(done)
	for {
		select {
		case n := <-p.b.Notifications():
			if n.Err != nil || len(n.Data) != 8 {
				continue
			}
			p.mu.Lock()
			number := binary.LittleEndian.Uint64(n.Data)
			if p.heard[number]++; p.heard[number] > 1 && len(p.broken) < 20 {
				p.broken = append(p.broken, fmt.Sprintf("message %#x came %d times", number,
					p.heard[number]))
			}
			p.mu.Unlock()
		case <-stop:
			return
		}
	}
}

// awaitMessages waits for those of transfers that succeeded.
func (p *promises) awaitMessages() {
	missing := func() (n int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		for number := range p.sent {
			if p.heard[number] == 0 {
				n++
			}
		}
		return n
	}
	for end := time.Now().Add(10 * time.Second); missing() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			p.breaks("%d messages of transfers that succeeded never came", missing())
			return
		}
	}
}

// promiser is one worker.
type promiser struct {
	*promises
	slot  uint64
	rng   *rand.Rand
	peer  *engine.Peer
	count uint64
}

func (w *promiser) work() {
	for n := 0; w.goesOn(n); {
		if !w.dial() {
			continue
		}
		n++
		w.note(&w.actions)
		switch w.rng.IntN(8) {
		case 0, 1, 2:
			w.move(engine.Write)
		case 3, 4:
			w.move(engine.Read)
		case 5, 6:
			w.lease()
		case 7:
			if w.rng.IntN(10) == 0 {
				w.hangUp()
			}
		}
	}
	if w.peer != nil {
		w.hangUp()
	}
}

// goesOn reports whether the run has not ended after n actions of this worker.
func (w *promiser) goesOn(n int) bool {
	if w.long.actions > 0 {
		return n < w.long.actions
	}
	return time.Now().Before(w.end)
}

// dial makes a connection if there is none that lives.
func (w *promiser) dial() bool {
	if w.peer != nil {
		select {
		case <-w.peer.Lost():
			w.hangUp()
		default:
			return true
		}
	}
	d, err := w.b.Describe()
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		w.peer, err = w.a.Connect(ctx, d)
	}
	if err != nil {
		w.peer = nil
		time.Sleep(500 * time.Microsecond) // it flaps
		return false
	}
	w.note(&w.connections)
	return true
}

func (w *promiser) hangUp() {
	if err := w.peer.Close(); err != nil {
		w.breaks("close a peer: %v", err)
	}
	w.peer = nil
}

// here and there are the worker's bytes on both sides.
func (w *promiser) here() []byte  { return w.src.Bytes()[w.slot*slotBytes:][:slotBytes] }
func (w *promiser) there() []byte { return w.dst.Bytes()[w.slot*slotBytes:][:slotBytes] }

// paint fills bytes with what never was there before.
func (w *promiser) paint(b []byte) {
	w.count++
	x := (w.slot+1)<<56 | w.count<<24
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], x+uint64(i))
	}
}

// move writes to the peer or reads from it, with luck to the end.
func (w *promiser) move(op engine.Op) {
	m, err := w.peer.Remote("dst")
	if err != nil {
		w.breaks("find the peer's region: %v", err)
		return
	}
	w.transfer(op, m, w.slot*slotBytes, func(*engine.Transfer) {})
}

// lease has the owner lease its slot, and revoke it at any moment.
func (w *promiser) lease() {
	l, err := w.dst.Lease(w.slot*slotBytes, slotBytes, engine.LeaseOptions{})
	if err != nil {
		w.breaks("lease: %v", err)
		return
	}
	revoke := func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := l.Revoke(ctx); err != nil {
			w.breaks("revoke: %v", err)
		}
	}
	defer revoke()
	m, err := w.peer.Import(l.Token())
	if err != nil {
		return // a connection that is lost
	}
	defer m.Close()
	w.transfer(engine.Write, m, 0, func(*engine.Transfer) {
		if w.rng.IntN(2) == 0 {
			return
		}
		time.Sleep(time.Duration(w.rng.IntN(300)) * time.Microsecond)
		revoke()
		w.note(&w.revoked)
		w.silent(w.there(), "after Revoke")
	})
}

// transfer runs one transfer of the slot, and something beside it.
func (w *promiser) transfer(op engine.Op, m *engine.Remote, at uint64,
	beside func(*engine.Transfer)) {
	t, err := w.a.NewTransfer(w.peer, op, engine.Route{})
	if err != nil {
		w.breaks("make a transfer: %v", err)
		return
	}
	defer func() {
		if err := t.Close(); err != nil {
			w.breaks("close a transfer: %v", err)
		}
	}()
	var deadline time.Time
	if w.rng.IntN(8) == 0 {
		deadline = time.Now().Add(time.Duration(w.rng.IntN(500)) * time.Microsecond)
	}
	if err := t.Schedule(engine.Class(w.rng.IntN(4)), deadline); err != nil {
		w.breaks("schedule a transfer: %v", err)
	}
	w.paint(w.here())
	w.paint(w.there())
	n := uint64(1 + w.rng.IntN(slotBytes))
	n -= n % 8
	if n == 0 {
		n = 8
	}
	off := uint64(w.rng.IntN(int(slotBytes-n+1))) &^ 7
	if err := t.Add(w.src, w.slot*slotBytes+off, m, at+off, n); err != nil {
		return // lost, or revoked
	}
	number := (w.slot+1)<<56 | w.count
	if op == engine.Write && w.rng.IntN(3) == 0 {
		if err := t.Notify(binary.LittleEndian.AppendUint64(nil, number)); err != nil {
			w.breaks("attach a message: %v", err)
		}
	} else {
		number = 0
	}
	from, to := w.there(), w.here()
	if op == engine.Write {
		from, to = to, from
	}
	want := slices.Clone(to)
	copy(want[off:off+n], from[off:off+n])
	if err := t.Post(); err != nil {
		w.failedWith(err)
		return
	}
	beside(t)
	w.outcome(t, number, want, to)
}

// outcome waits for the end of a transfer, or makes it end.
func (w *promiser) outcome(t *engine.Transfer, number uint64, want, to []byte) {
	abort := w.rng.IntN(4) == 0
	if abort {
		time.Sleep(time.Duration(w.rng.IntN(400)) * time.Microsecond)
	} else {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		_ = t.Wait(ctx)
		cancel()
		abort = ctx.Err() == context.DeadlineExceeded
	}
	revoked := w.wasRevoked(to)
	if err := t.Abort(context.Background()); err != nil {
		w.breaks("no proof: %v", err)
		return
	}
	err := t.Err()
	if !t.Done() || t.Err() != err {
		w.breaks("a transfer has no one outcome: done %v, %v, %v", t.Done(), err, t.Err())
	}
	switch {
	case err == nil:
		w.note(&w.succeeded)
		if !revoked && !bytes.Equal(to, want) {
			w.breaks("a transfer succeeded, and %d bytes are wrong", differences(to, want))
		}
		if number != 0 {
			w.mu.Lock()
			w.sent[number] = true
			w.mu.Unlock()
		}
	case errors.Is(err, engine.ErrAborted):
		w.note(&w.aborted)
	default:
		w.failedWith(err)
	}
	w.silent(to, "after the end of a transfer with "+fmt.Sprint(err))
}

// wasRevoked reports whether the target was painted anew when its lease had ended.
func (w *promiser) wasRevoked(to []byte) bool {
	v, ok := w.leased.LoadAndDelete(w.slot)
	return ok && bytes.Equal(v.([]byte), to)
}

// silent paints bytes anew, and looks whether anybody writes there.
func (w *promiser) silent(b []byte, when string) {
	w.paint(b)
	want := slices.Clone(b)
	if strings.HasPrefix(when, "after Revoke") {
		w.leased.Store(w.slot, want)
	}
	time.Sleep(time.Duration(w.rng.IntN(4)) * time.Millisecond)
	if !bytes.Equal(b, want) {
		w.breaks("%d bytes landed %s", differences(b, want), when)
	}
}

// failedWith notes a failure, which must be one that faults explain.
func (w *promiser) failedWith(err error) {
	w.note(&w.failed)
	for _, known := range []error{engine.ErrPeerLost, engine.ErrRevoked, engine.ErrTimeout,
		engine.ErrClosed} {
		if errors.Is(err, known) {
			return
		}
	}
	w.breaks("a transfer failed with %v", err)
}

func differences(a, b []byte) (n int) {
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

var (
	promisesSeed = flag.Uint64("fault.seed", 0, "of the run of promises under faults; 0: "+
		"by the clock")
	promisesFor = flag.Duration("fault.for", 8*time.Second,
		"how long that run is, for each backend")
)

// TestSoakPromisesUnderFaults is TestPromisesUnderFaults for as long as one likes, each time with
// other choices, and over a tcp that soon asks about what is old.
func TestSoakPromisesUnderFaults(t *testing.T) {
	seed := *promisesSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	backends := maps.Clone(promisesBackends)
	backends["tcp"] = func() (driver.Backend, error) {
		return tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0",
			Grace: 20 * time.Millisecond, CloseMax: 100 * time.Millisecond})
	}
	for name, open := range backends {
		t.Run(name, func(t *testing.T) {
			t.Logf("again with: go test ./engine -run %s -fault.seed %d -fault.for %v", t.Name(),
				seed, *promisesFor)
			promisesUnderFaults(t, open, seed, runLength{time: *promisesFor})
		})
	}
}
