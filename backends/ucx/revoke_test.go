// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bytes"
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
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
	_, _ = unix.Write(f.control, one)
}

// freeze has f hold the messages of peers back until it is thawed.
func (f *meddled) freeze(frozen bool) {
	f.mu.Lock()
	f.frozen = frozen
	f.mu.Unlock()
	_, _ = unix.Write(f.control, one)
}

// lose has every connection of a backend be given up, as UCX does when the other side is gone.
func (f *meddled) lose(b *Backend) {
	for id := range b.allEnds() {
		f.push(ucp.Control{Conn: id, Lost: true})
	}
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

// TestRevokeWhileAPageDoesNotCome has a worker of the owner stand in a page that does not come,
// of memory that a peer writes to. No Revoke has a proof then, of that memory or of other, and each
// returns when its context is over; nothing lands any more all the same, and the proofs are there
// once the page has come.
func TestRevokeWhileAPageDoesNotCome(t *testing.T) {
	p := openPair(t, Config{})
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.far.Close(); _ = unix.Munmap(mem) })
	late, err := testkit.WithholdPages(mem)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	defer late.Supply(t)
	stuck, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: mem,
		Secret: [16]byte{2}})
	require.NoError(t, err)
	key := p.imports(t, stuck)
	other, otherKey := p.share(t)
	from, err := p.near.Register(driver.Segment{Kind: driver.DRAM, Len: 4096,
		Mem: bytes.Repeat([]byte{7}, 4096)})
	require.NoError(t, err)
	write := func(tag uint64, key uint32) {
		require.NoError(t, p.peer.Submit(tag, &driver.Batch{Op: driver.Write,
			Descs: []driver.Desc{{Len: 4096, LocalKey: from.Key(), RemoteKey: key}}}))
	}
	write(1, key)
	late.Await(t)
	for _, m := range []driver.Memory{stuck, other} {
		for _, limit := range []time.Duration{0, time.Millisecond} {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			require.ErrorIs(t, m.Revoke(ctx), driver.ErrTimeout)
			cancel()
		}
		_, err := m.AppendToken(nil)
		require.ErrorIs(t, err, driver.ErrClosed)
	}
	write(2, otherKey) // admitted by nothing any more
	late.Supply(t)
	require.NoError(t, stuck.Revoke(t.Context()))
	require.NoError(t, other.Revoke(t.Context()))
	landed := bytes.Clone(other.bytes)
	outcomes := map[uint64]error{}
	var done [2]driver.Completion
	for end := time.Now().Add(patience); len(outcomes) < 2; {
		n, err := p.near.Poll(done[:])
		require.NoError(t, err)
		for _, c := range done[:n] {
			outcomes[c.Tag] = c.Err
		}
		require.True(t, time.Now().Before(end), "the batches do not complete")
		runtime.Gosched()
	}
	require.NoError(t, outcomes[1], "its bytes were in hand")
	require.ErrorIs(t, outcomes[2], driver.ErrRevoked)
	require.Equal(t, make([]byte, 4096), landed)
	require.Equal(t, landed, other.bytes)
}
