// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// pair is two backends, one connected to the other.
type pair struct {
	near, far *Backend
	peer      *peer
}

func openPair(t *testing.T, cfg Config) pair {
	t.Helper()
	testkit.CheckLeaks(t)
	p := pair{openMeddled(t, cfg), openMeddled(t, cfg), nil}
	p.peer = p.connect(t)
	return p
}

// meddled is a context of UCX of which a test sees and changes what this package gets.
type meddled struct {
	fabric
	control int // the eventfd

	mu       sync.Mutex
	frozen   bool // control messages wait
	injected []ucp.Control
}

func (f *meddled) Control() (ucp.Control, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.frozen:
		return ucp.Control{}, false
	case len(f.injected) > 0:
		m := f.injected[0]
		f.injected = f.injected[1:]
		return m, true
	}
	return f.fabric.Control()
}

func (f *meddled) push(m ucp.Control) {
	f.mu.Lock()
	f.injected = append(f.injected, m)
	f.mu.Unlock()
	proc.SignalFD(uintptr(f.control))
}

// freeze has f hold the messages of peers back until it is thawed.
func (f *meddled) freeze(frozen bool) {
	f.mu.Lock()
	f.frozen = frozen
	f.mu.Unlock()
	proc.SignalFD(uintptr(f.control))
}

// openMeddled opens a backend over it. Where a test says no Grace, nothing waits for one.
func openMeddled(t *testing.T, cfg Config) *Backend {
	t.Helper()
	if cfg.Grace == 0 {
		cfg.Grace = graceMax
	}
	cfg.Transports, cfg.Devices, cfg.Workers = "tcp", "lo", 2
	b, err := open(cfg, func(u ucp.Config) (fabric, error) {
		net, err := openUCX(u)
		if err != nil {
			return nil, err
		}
		return &meddled{fabric: net, control: u.ControlFD}, nil
	})
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}

func (p *pair) connect(t *testing.T) *peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := p.near.Connect(ctx, p.far.Addr())
	require.NoError(t, err)
	return c.(*peer)
}

func contextOf(b *Backend) *meddled { return b.net.(*meddled) }

// share registers memory and imports it.
func (p *pair) share(t *testing.T) (*memory, uint32) {
	t.Helper()
	m, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: make([]byte, 4096),
		Secret: [16]byte{1}})
	require.NoError(t, err)
	return m.(*memory), p.imports(t, m)
}

func (p *pair) imports(t *testing.T, m driver.Memory) uint32 {
	t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key, size, err := p.peer.Import(token)
	if err != nil || size != 4096 {
		t.Fatalf("import: %d bytes, %v", size, err)
	}
	return key
}

// standing is a pair whose owner has a worker that stands in a page which does not come, of memory
// that the peer writes to or reads: behind the look at ticket and age, with the copy in hand.
type standing struct {
	pair
	pages        *testkit.WithheldMemory
	stuck, other *memory // the page is of stuck
	otherKey     uint32
	near         *memory // the peer's own
}

func openStanding(t *testing.T, op driver.Op) *standing {
	t.Helper()
	s := &standing{pair: openPair(t, Config{})}
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.far.Close(); _ = unix.Munmap(mem) })
	if s.pages, err = testkit.WithholdPages(mem); err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() { s.pages.Supply(t) })
	stuck, err := s.far.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: mem,
		Secret: [16]byte{2}})
	require.NoError(t, err)
	s.stuck = stuck.(*memory)
	key := s.imports(t, stuck)
	s.other, s.otherKey = s.share(t)
	local, err := s.pair.near.Register(driver.Segment{Kind: driver.DRAM, Len: 4096,
		Mem: bytes.Repeat([]byte{7}, 4096)})
	require.NoError(t, err)
	s.near = local.(*memory)
	s.submit(t, 1, op, key)
	s.pages.Await(t)
	return s
}

func (s *standing) submit(t *testing.T, tag uint64, op driver.Op, key uint32) {
	t.Helper()
	require.NoError(t, s.peer.Submit(tag, &driver.Batch{Op: op,
		Descs: []driver.Desc{{Len: 4096, LocalKey: s.near.Key(), RemoteKey: key}}}))
}

// unproven fails the test unless a Revoke of either memory returns when its context is over,
// without a proof, and no token is given any more.
func (s *standing) unproven(t *testing.T) {
	t.Helper()
	for _, m := range []driver.Memory{s.stuck, s.other} {
		for _, limit := range []time.Duration{0, time.Millisecond} {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			require.ErrorIs(t, m.Revoke(ctx), driver.ErrTimeout)
			cancel()
		}
		_, err := m.AppendToken(nil)
		require.ErrorIs(t, err, driver.ErrClosed)
	}
}

// TestRevokeWhileAPageDoesNotCome: no Revoke has a proof then, of that memory or of other. Nothing
// lands any more all the same, and the proofs are there once the page has come.
func TestRevokeWhileAPageDoesNotCome(t *testing.T) {
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		t.Run(op.String(), func(t *testing.T) { revokeWhileAPageDoesNotCome(t, op) })
	}
}

func revokeWhileAPageDoesNotCome(t *testing.T, op driver.Op) {
	p := openStanding(t, op)
	p.unproven(t)
	p.submit(t, 2, driver.Write, p.otherKey) // admitted by nothing any more
	p.pages.Supply(t)
	require.NoError(t, p.stuck.Revoke(t.Context()))
	landed := bytes.Clone(p.stuck.bytes)
	if op == driver.Read { // its program writes to it again
		copy(p.stuck.bytes, bytes.Repeat([]byte{9}, 4096))
	}
	require.NoError(t, p.other.Revoke(t.Context()))
	outcomes := map[uint64]error{}
	var done [2]driver.Completion
	for end := time.Now().Add(patience); len(outcomes) < 2; {
		n, err := p.pair.near.Poll(done[:])
		require.NoError(t, err)
		for _, c := range done[:n] {
			outcomes[c.Tag] = c.Err
		}
		require.True(t, time.Now().Before(end), "the batches do not complete")
		runtime.Gosched()
	}
	require.NoError(t, outcomes[1], "its bytes were in hand")
	require.ErrorIs(t, outcomes[2], driver.ErrRevoked)
	require.Equal(t, make([]byte, 4096), p.other.bytes, "bytes landed behind the revoke")
	if op == driver.Write {
		require.Equal(t, landed, p.stuck.bytes, "bytes landed behind the revoke")
	}
	require.Equal(t, landed, p.near.bytes, "bytes that were written behind the revoke were read")
}

// TestCloseWhileAPageDoesNotCome has Backend.Close wait for the page: it has ended the epoch of
// every memory before, a Revoke beside it waits no longer than its context, and one after it gives
// nil.
func TestCloseWhileAPageDoesNotCome(t *testing.T) {
	p := openStanding(t, driver.Write)
	closed := make(chan error, 1)
	go func() { closed <- p.far.Close() }()
	for _, m := range []*memory{p.stuck, p.other} {
		eventually(t, "Close ends the epoch", func() bool {
			_, err := m.AppendToken(nil)
			return errors.Is(err, driver.ErrClosed)
		})
	}
	p.unproven(t)
	require.Empty(t, closed)
	p.pages.Supply(t)
	require.NoError(t, <-closed)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, p.stuck.Revoke(over))
	require.NoError(t, p.other.Revoke(over))
}
