// SPDX-License-Identifier: Apache-2.0

package files

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// idle is a Mover that moves nothing: a request is under way until it is let go, or cancelled.
type idle struct {
	c       *Core
	with    []*Request // guarded by Core.Mu
	landed  []Landing  // so is this
	kept    bool       // a cancel ends nothing
	pending atomic.Bool
	dropped []*Memory
	refused error // of DropFile and DropMemory
}

func (m *idle) Put(r *Request) { m.with = append(m.with, r) }

func (m *idle) Cancel(r *Request) {
	if !m.kept {
		m.land(r, syscall.ECANCELED)
	}
}

func (m *idle) land(r *Request, err error) {
	m.with = slices.DeleteFunc(m.with, func(o *Request) bool { return o == r })
	m.landed = append(m.landed, Landing{R: r, N: int(r.N), Err: err})
	m.pending.Store(true)
}

func (m *idle) Reap(out []Landing) int {
	n := copy(out, m.landed)
	m.landed = m.landed[n:]
	m.pending.Store(len(m.landed) > 0)
	return n
}

func (m *idle) Listen(bool) {}

func (m *idle) Kick() {
	if m.pending.Load() {
		m.c.Serve()
	}
}

func (m *idle) Pending() bool                   { return m.pending.Load() }
func (m *idle) Arm() bool                       { return m.Pending() }
func (m *idle) Wake()                           {}
func (m *idle) AddFile(*File) error             { return nil }
func (m *idle) DropFile(*File) error            { return m.refused }
func (m *idle) Close() error                    { return nil }
func (m *idle) Explain(*Memory, *Memory) string { return "" }

func (m *idle) AddMemory(*Memory, *driver.Segment) error { return nil }

func (m *idle) DropMemory(mem *Memory) error {
	m.dropped = append(m.dropped, mem)
	return m.refused
}

// rig is a backend over it, with memory and a file.
type rig struct {
	Backend
	t         *testing.T
	c         *Core
	m         *idle
	p         driver.Peer
	mem, file driver.Memory
	key       uint32 // of file, as the peer knows it
	fd        int
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, m: &idle{}}
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.File)
	var err error
	r.Backend, err = Open(Config{
		Caps:    driver.Caps{Name: "idle", Pairs: pairs, DescsMax: 2, RunsMax: 2},
		Can:     driver.CanDurable,
		KeysMax: 8, JobsMax: 8, Depth: 4, PieceMax: 64 << 10, CachedMax: 64 << 10, PlacesMax: 1,
		Buffered: true, Memory: "memory", Disk: "the disk"},
		func(c *Core) (Mover, error) {
			r.c, r.m.c = c, c
			return r.m, nil
		})
	require.NoError(t, err)
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(100))
	r.fd = int(f.Fd())
	t.Cleanup(func() {
		require.NoError(t, r.Backend.Close())
		require.NoError(t, f.Close())
	})
	r.p, err = r.Connect(t.Context(), r.Addr())
	require.NoError(t, err)
	r.mem = r.register(driver.Segment{Kind: driver.DRAM, Len: 100, Mem: make([]byte, 100)})
	r.file = r.register(driver.Segment{Kind: driver.File, Len: 100, FD: r.fd})
	r.key, _, err = r.p.Import(r.token(r.file))
	require.NoError(t, err)
	return r
}

func (r *rig) register(seg driver.Segment) driver.Memory {
	r.t.Helper()
	m, err := r.Register(seg)
	require.NoError(r.t, err)
	return m
}

func (r *rig) token(m driver.Memory) []byte {
	r.t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(r.t, err)
	return token
}

// begin has a batch be under way.
func (r *rig) begin() error {
	return r.p.Submit(7, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: 10,
		LocalKey: r.mem.Key(), RemoteKey: r.key}}})
}

func (r *rig) underWay() int {
	r.c.Mu.Lock()
	defer r.c.Mu.Unlock()
	return len(r.c.jobs) - len(r.c.freeJobs)
}

// letGo ends what is under way.
func (r *rig) letGo() {
	r.c.Mu.Lock()
	r.m.kept = false
	for _, q := range slices.Clone(r.m.with) {
		r.m.land(q, nil)
	}
	r.c.Mu.Unlock()
	r.m.Kick()
}

// TestEnds: each way to end a batch returns when it is over, and what comes later is refused.
func TestEnds(t *testing.T) {
	for name, v := range map[string]struct {
		end   func(r *rig) error
		after error // of the next batch
	}{
		"revoke of file": {func(r *rig) error {
			return r.file.Revoke(t.Context())
		}, driver.ErrRevoked},
		"revoke of memory": {func(r *rig) error {
			return r.mem.Revoke(t.Context())
		}, driver.ErrBounds},
		"close of peer": {func(r *rig) error { return r.p.Close() }, driver.ErrClosed},
		"close":         {func(r *rig) error { return r.Backend.Close() }, driver.ErrClosed},
		"cancel":        {func(r *rig) error { r.p.Cancel(7); return nil }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			require.NoError(t, r.begin())
			require.Equal(t, 1, r.underWay())
			require.NoError(t, v.end(r))
			require.Zero(t, r.underWay())
			require.ErrorIs(t, r.begin(), v.after)
		})
	}
}

// TestLeavesOthersAlone: a revoke of one memory is nothing to batches that do not use it.
func TestLeavesOthersAlone(t *testing.T) {
	r := newRig(t)
	other := r.register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.NoError(t, r.begin())
	r.p.Cancel(8)
	require.NoError(t, other.Revoke(t.Context()))
	require.Equal(t, 1, r.underWay())
	require.Equal(t, []*Memory{other.(*Memory)}, r.m.dropped)
}

// TestProofWaits: revokes of memory that a request may land in return only when the request has
// ended, each no later than its context.
func TestProofWaits(t *testing.T) {
	r := newRig(t)
	r.m.kept = true
	require.NoError(t, r.begin())
	over := make(chan error, 3)
	for range cap(over) {
		go func() { over <- r.file.Revoke(context.Background()) }()
	}
	for waiters := 0; waiters < 3; runtime.Gosched() {
		r.c.Mu.Lock()
		waiters = r.c.waiters
		r.c.Mu.Unlock()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := r.file.Revoke(ctx)
	require.ErrorIs(t, err, driver.ErrTimeout)
	require.ErrorContains(t, err, "the disk has not answered")
	require.Empty(t, over)
	var done [1]driver.Completion
	n, err := r.Poll(done[:])
	require.NoError(t, err)
	require.Zero(t, n, "nothing completes before its end is known")
	r.letGo()
	for range 3 {
		require.NoError(t, <-over)
	}
	n, err = r.Poll(done[:])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.ErrorIs(t, done[0].Err, driver.ErrRevoked)
}

// TestRevokeThatFailedKeepsItsKey: no other memory has the key until the Mover has given the memory
// up, and nil says that it has.
func TestRevokeThatFailedKeepsItsKey(t *testing.T) {
	r := newRig(t)
	r.m.refused = unix.EIO
	for _, m := range []driver.Memory{r.file, r.mem} {
		require.ErrorIs(t, m.Revoke(t.Context()), unix.EIO)
		require.ErrorIs(t, m.Revoke(t.Context()), unix.EIO)
	}
	other := r.register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.NotContains(t, []uint32{r.file.Key(), r.mem.Key()}, other.Key())
	r.m.refused = nil
	for _, m := range []driver.Memory{r.file, r.mem} {
		require.NoError(t, m.Revoke(t.Context()))
		require.NoError(t, m.Revoke(t.Context()))
	}
	again := r.register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.Contains(t, []uint32{r.file.Key(), r.mem.Key()}, again.Key())
}

// TestTokens: a token is good for its own backend, until it is revoked, and for files.
func TestTokens(t *testing.T) {
	r, other := newRig(t), newRig(t)
	_, _, err := r.p.Import(r.token(r.mem))
	require.ErrorIs(t, err, driver.ErrNotSupported)
	_, _, err = r.p.Import(other.token(other.file))
	require.ErrorIs(t, err, driver.ErrBadToken)
	require.ErrorIs(t, err, driver.ErrNotSupported)
	_, err = r.Connect(t.Context(), other.Addr())
	require.ErrorIs(t, err, driver.ErrNotSupported)
	before := r.token(r.file)
	require.NoError(t, r.file.Revoke(t.Context()))
	_, _, err = r.p.Import(before)
	require.ErrorIs(t, err, driver.ErrRevoked)
	r.p.Drop(r.key)
	require.ErrorIs(t, r.begin(), driver.ErrBounds)
}

// TestNoDurableWithoutADescriptorOfOurOwn: where a file cannot be opened once more, as without
// /proc, its writes are not durable, and say so. All else goes on.
func TestNoDurableWithoutADescriptorOfOurOwn(t *testing.T) {
	reopen = func(int, int) (int, error) { return -1, syscall.ENOENT }
	defer func() { reopen = Reopen }()
	r := newRig(t)
	err := r.p.Submit(1, &driver.Batch{Op: driver.Write, Durable: true, Descs: []driver.Desc{
		{Len: 10, LocalKey: r.mem.Key(), RemoteKey: r.key}}})
	require.ErrorIs(t, err, driver.ErrNotSupported)
	require.ErrorContains(t, err, "/proc")
	require.NoError(t, r.begin())
}

// TestAdmit registers what was opened in other ways, and ranges that the file does not have.
func TestAdmit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	for _, v := range []struct {
		flags int
		seg   driver.Segment
		want  error
	}{
		{os.O_RDWR, driver.Segment{FileOff: 96, Len: 4000}, nil},
		{os.O_RDONLY, driver.Segment{Len: 4096, ReadOnly: true}, nil},
		{os.O_RDWR, driver.Segment{FileOff: 97, Len: 4000}, driver.ErrBounds},
		{os.O_RDWR, driver.Segment{FileOff: 1 << 63, Len: 1 << 63}, driver.ErrBounds},
		{os.O_RDONLY, driver.Segment{Len: 4096}, driver.ErrReadOnly},
		{os.O_WRONLY, driver.Segment{Len: 4096}, nil},
		{os.O_RDWR | os.O_APPEND, driver.Segment{Len: 4096}, driver.ErrNotSupported},
		{unix.O_PATH, driver.Segment{Len: 4096}, driver.ErrNotSupported},
	} {
		f, err := os.OpenFile(path, v.flags, 0)
		require.NoError(t, err)
		v.seg.FD = int(f.Fd())
		id, err := admit(&v.seg)
		require.ErrorIs(t, err, v.want, "flags %#x, [%d, +%d)", v.flags, v.seg.FileOff, v.seg.Len)
		if err == nil {
			require.Equal(t, path, name(v.seg.FD, id))
		}
		require.NoError(t, f.Close())
	}
	_, err := admit(&driver.Segment{FD: -1})
	require.ErrorIs(t, err, unix.EBADF)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	require.NoError(t, err)
	defer null.Close()
	_, err = admit(&driver.Segment{FD: int(null.Fd()), Len: 1})
	require.ErrorIs(t, err, driver.ErrNotSupported)
}

// closing has Register go on only when Close has listed the memories.
type closing struct {
	*idle
	r      *rig
	closed chan error
}

func (m *closing) AddMemory(*Memory, *driver.Segment) error {
	go func() { m.closed <- m.r.Backend.Close() }()
	for m.r.c.gate.Enter() { // Close has listed the memories when it shuts the gate
		m.r.c.gate.Exit()
		runtime.Gosched()
	}
	return nil
}

// TestRegisterBesideClose: what Register makes known while Close runs is given back.
func TestRegisterBesideClose(t *testing.T) {
	r := newRig(t)
	m := &closing{r.m, r, make(chan error, 1)}
	r.c.Mover = m
	_, err := r.Register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.ErrorIs(t, err, driver.ErrClosed)
	require.NoError(t, <-m.closed)
	require.True(t, slices.ContainsFunc(r.m.dropped, func(m *Memory) bool { return m.Size == 1 }))
	require.ErrorIs(t, r.begin(), driver.ErrClosed)
}

// TestKindsOfWriteTakeTurns: what may begin to be written to an inode, by what is under way, what
// is to be tried again, and which job waits.
func TestKindsOfWriteTakeTurns(t *testing.T) {
	mine, other := &job{}, &job{}
	for i, c := range []struct {
		writing, waiting  [2]int
		blocked           *job
		blockedKind, kind int
		may               bool
		after             *job // inode.blocked
	}{
		{kind: cached, may: true},
		{writing: [2]int{cached: 3}, kind: cached, may: true},
		{writing: [2]int{cached: 3}, kind: direct, after: mine},
		{writing: [2]int{direct: 1}, kind: cached, after: mine},
		{writing: [2]int{direct: 1}, blocked: other, blockedKind: cached, kind: direct,
			after: other},
		{writing: [2]int{direct: 1}, blocked: other, blockedKind: cached, kind: cached,
			after: other},
		{blocked: other, blockedKind: cached, kind: cached, may: true, after: other},
		{blocked: mine, blockedKind: cached, kind: cached, may: true},
		{writing: [2]int{direct: 1}, waiting: [2]int{cached: 1}, kind: direct},
		{writing: [2]int{direct: 1}, waiting: [2]int{direct: 1}, kind: direct, may: true},
		{waiting: [2]int{cached: 1}, kind: cached, may: true},
	} {
		n := &inode{writing: c.writing, waiting: c.waiting, blocked: c.blocked,
			blockedKind: c.blockedKind}
		may := mine.mayWrite(&place{f: &File{inode: n}}, c.kind == direct)
		require.Equal(t, c.may, may, "case %d", i)
		require.Same(t, c.after, n.blocked, "case %d", i)
	}
}

// TestTurnOfAJobThatFails has a write wait until another job, which wants the other kind of write
// to the same file, has had its turn, and that job fails: the write begins at once.
func TestTurnOfAJobThatFails(t *testing.T) {
	r := newRig(t)
	c := r.c
	inode := r.file.(*Memory).File.inode
	c.Mu.Lock()
	inode.writing[direct]++ // a write past the page cache is under way: both jobs stay queued
	c.Mu.Unlock()
	for _, tag := range []uint64{1, 2} {
		require.NoError(t, r.p.Submit(tag, &driver.Batch{Op: driver.Write,
			Descs: []driver.Desc{{Len: 10, LocalKey: r.mem.Key(), RemoteKey: r.key}}}))
	}
	c.Mu.Lock()
	require.Equal(t, 2, c.queue.n)
	inode.writing[direct]--
	inode.blocked, inode.blockedKind = c.queue.last, direct
	c.fail(c.queue.last, syscall.EIO)
	c.pump()
	begun := len(r.m.with)
	c.Leave()
	require.Equal(t, 1, begun, "the write that waited has not begun")
	r.letGo()
	ends := map[uint64]error{}
	for done := make([]driver.Completion, 2); len(ends) < 2; {
		n, err := r.Poll(done)
		require.NoError(t, err)
		for _, d := range done[:n] {
			ends[d.Tag] = d.Err
		}
	}
	require.NoError(t, ends[1])
	require.ErrorIs(t, ends[2], syscall.EIO)
}
