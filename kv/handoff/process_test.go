// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
)

// prefillAt makes the test binary a prefill process for a decode side that
// serves this socket.
var prefillAt = flag.String("prefill-at", "", "socket of the decode side; for the tests' own use")

func TestMain(m *testing.M) {
	flag.Parse()
	if *prefillAt == "" && *groupPrefillAt == "" {
		os.Exit(m.Run())
	}
	process, at := prefillProcess, *prefillAt
	if at == "" {
		process, at = groupPrefillProcess, *groupPrefillAt
	}
	if err := process(at); err != nil {
		fmt.Fprintln(os.Stderr, "prefill process:", err)
		os.Exit(1)
	}
}

// prefillIDs are the hashes of every request of the prefill process.
var prefillIDs = []uint64{1, 2, 3, 4}

// prefillProcess hands the same blocks over again and again, as private ones, and
// bears that the other side ends requests. It ends when that is gone.
func prefillProcess(socket string) error {
	b, err := shm.New(shm.Config{})
	if err != nil {
		return err
	}
	s := newStands(b)
	eng, err := engine.Open(engine.Config{Name: "prefill", Backends: []driver.Backend{s}})
	if err != nil {
		return err
	}
	defer eng.Close()
	g, err := layout.New(large, layout.Options{Blocks: uint64(len(prefillIDs))})
	if err != nil {
		return err
	}
	memory, err := eng.Alloc(g.PoolBytes(), engine.AllocOptions{Purpose: "kv"})
	if err != nil {
		return err
	}
	region, err := eng.Register("kv", memory.Segment())
	if err != nil {
		return err
	}
	blocks := make([]Block, len(prefillIDs))
	for i, id := range prefillIDs {
		blocks[i].Local = uint32(i)
		for layer := range g.Layers() {
			for part := range g.Parts() {
				r, _ := g.Piece(uint64(i), layer, part)
				copy(region.Bytes()[r.Off:], content(id, layer, part, int(r.Len)))
			}
		}
	}
	peer, err := eng.Dial(context.Background(), "unix", socket)
	if err != nil {
		return err
	}
	sender, err := NewSender(NewMux(eng), SenderConfig{Region: region, Geometry: g})
	if err != nil {
		return err
	}
	for number := uint64(0); ; number++ {
		s.request.Store(number)
		push, err := sender.Begin(context.Background(), peer, number, blocks)
		for layer := 0; err == nil && layer < g.Layers(); layer++ {
			err = push.Layer(context.Background(), layer)
		}
		if err == nil {
			_ = push.Finish(context.Background())
		}
		select {
		case <-peer.Lost():
			return nil
		default:
		}
	}
}

// newDecode opens the decode side alone, over shm, and serves a socket.
// idle is how long its receiver waits for a sign of life.
func newDecode(t *testing.T, blocks int, idle time.Duration) (p *pair, socket string) {
	t.Helper()
	testkit.CheckLeaks(t)
	p = &pair{decode: newSide(t, "decode", setup{model: large, backend: newShm},
		layout.Options{Blocks: uint64(blocks)})}
	var err error
	p.pool, err = pool.New(blocks)
	require.NoError(t, err)
	p.receiver, err = NewReceiver(p.decode.mux, ReceiverConfig{
		Region: p.decode.region, Geometry: p.decode.geometry, Pool: p.pool,
		IdleTimeout: idle,
	})
	require.NoError(t, err)
	socket = filepath.Join(t.TempDir(), "decode.sock")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- p.decode.eng.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		<-served
		p.receiver.Close()
		if s := p.pool.Stats(); s.Used != 0 || s.Retired != 0 {
			testkit.ErrorBroken(t, "blocks leaked: %+v, %+v", s, p.receiver.Stats())
		}
	})
	return p, socket
}

// settle waits for the end of a request and reports whether it was complete; then
// its bytes must be right.
func (p *pair) settle(t *testing.T, q *Request) bool {
	t.Helper()
	select {
	case <-q.Done():
	case <-time.After(limit):
		t.Fatal("a request does not end")
	}
	if q.Err() != nil {
		return false
	}
	for layer := range p.decode.geometry.Layers() {
		p.checkLayer(t, q, layer, prefillIDs)
	}
	return true
}

func (p *pair) acceptOne(t *testing.T) *Request {
	t.Helper()
	q, err := p.receiver.Accept(within(t))
	require.NoError(t, err)
	return q
}

// acceptFirst accepts the first request of a process. One before it is of a process that was
// killed: what it sent last is looked at when the rest has ended.
func (p *pair) acceptFirst(t *testing.T) *Request {
	t.Helper()
	for {
		q := p.acceptOne(t)
		if q.ID == 0 {
			return q
		}
		require.False(t, p.settle(t, q))
		require.ErrorIs(t, q.Err(), engine.ErrPeerLost)
		q.Release()
	}
}

// standing has the process stand in the middle of a request, and returns that. It gives those
// before it back.
func (p *pair) standing(t *testing.T, c *child) *Request {
	t.Helper()
	c.stand(t)
	stood := c.stood()
	var q *Request
	for in := uint64(math.MaxUint64); q == nil || q.ID != in; {
		select {
		case next := <-p.receiver.accept:
			if q != nil {
				p.settle(t, q)
				q.Release()
			}
			q = next
		case number, ok := <-stood:
			require.True(t, ok, "the process does not stand")
			in, stood = number, nil
		}
	}
	return q
}

// TestTimedKilledPrefill kills the prefill process in the middle of a request, and at any moment.
func TestTimedKilledPrefill(t *testing.T) {
	p, socket := newDecode(t, 8, time.Minute) // who is killed is lost, whatever the limit
	r := rand.New(rand.NewPCG(7, 7))
	for round := range 6 {
		process := startChild(t, "-prefill-at", socket)
		first := p.acceptFirst(t)
		if !p.settle(t, first) {
			t.Errorf("the first request: %v", first.Err())
		}
		first.Release()
		var q *Request
		if round%2 == 0 {
			q = p.standing(t, process)
		} else {
			q = p.acceptOne(t)
			time.Sleep(time.Duration(r.IntN(1500)) * time.Microsecond)
		}
		require.NoError(t, process.Kill())
		complete := p.settle(t, q)
		q.Release()
		if complete && round%2 == 0 {
			testkit.FatalBroken(t, "a request without a layer is complete")
		}
		if !complete && !errors.Is(q.Err(), engine.ErrPeerLost) {
			t.Errorf("the request of a killed peer: %v", q.Err())
		}
		p.drop(t)
		check := p.fence(t, q.Blocks...)
		time.Sleep(10 * time.Millisecond)
		check()
	}
}

// drop waits until every other request of the dead peer has ended too.
func (p *pair) drop(t *testing.T) {
	t.Helper()
	await(t, "the pool gets its blocks back", func() bool {
		select {
		case q := <-p.receiver.accept:
			q.Release()
		default:
		}
		return p.pool.Stats().Used == 0
	})
}

// TestTimedStoppedPrefill stops the prefill process before a copy, and at any moment, uses the
// blocks again, and continues it: nothing may land.
func TestTimedStoppedPrefill(t *testing.T) {
	p, socket := newDecode(t, 8, 250*time.Millisecond)
	r := rand.New(rand.NewPCG(8, 8))
	process := startChild(t, "-prefill-at", socket)
	ended := 0
	for round := range 12 {
		stands := round%2 == 0
		var q *Request
		if stands {
			q = p.standing(t, process)
		} else {
			q = p.acceptOne(t)
			time.Sleep(time.Duration(r.IntN(1000)) * time.Microsecond)
		}
		require.NoError(t, testkit.Freeze(process.Process))
		complete := p.settle(t, q)
		q.Release()
		p.drop(t)
		check := p.fence(t, q.Blocks...)
		require.NoError(t, testkit.Thaw(process.Process))
		if stands {
			process.letGo(t)
			if complete {
				testkit.FatalBroken(t, "a request without a layer is complete")
			}
		}
		time.Sleep(20 * time.Millisecond)
		check()
		if !complete {
			ended++
			if !errors.Is(q.Err(), engine.ErrTimeout) && !errors.Is(q.Err(), engine.ErrPeerLost) {
				t.Errorf("the request of a stopped peer: %v", q.Err())
			}
		}
	}
	t.Logf("%d of 12 requests were stopped in the middle", ended)
}
