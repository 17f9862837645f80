// SPDX-License-Identifier: Apache-2.0

package ownfiles

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// rig is a backend that moves nothing: its job is under way until land.
type rig struct {
	Flights[int]
	t        *testing.T
	job      Job[int]
	peer     Peer[int]
	mem      driver.Memory
	file     driver.Memory
	key      uint32 // of file, as the peer knows it
	slow     bool   // stop does not land it
	released []int
	refused  error // of release
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t}
	// of which none is polled
	r.Open(Config[int]{Name: "idle", Memory: "memory", Mover: "nobody", KeysMax: 8, JobsMax: 8,
		DescsMax: 2, RunsMax: 2,
		Room: func() bool { return false }, Ends: func(*Job[int]) bool { return true },
		Stop: r.stop, Leave: r.Mu.Unlock, Release: r.release})
	r.Add(&r.job)
	require.NoError(t, r.Connect(t.Context(), r.Addr(), &r.peer))
	r.mem = r.register(driver.Segment{Kind: driver.DRAM, Len: 100, Mem: make([]byte, 100)}, 1)
	r.file = r.register(driver.Segment{Kind: driver.File, Len: 100, FD: 0}, 2)
	key, size, err := r.peer.Import(r.token(r.file))
	if err != nil || size != 100 {
		t.Fatalf("%d bytes, %v", size, err)
	}
	r.key = key
	return r
}

func (r *rig) register(seg driver.Segment, extent int) driver.Memory {
	r.t.Helper()
	m, err := r.Register(&seg, func(m *Memory[int]) error {
		m.Extent = extent
		return nil
	})
	require.NoError(r.t, err)
	return m
}

func (r *rig) token(m driver.Memory) []byte {
	r.t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(r.t, err)
	return token
}

func (r *rig) release(m *Memory[int]) error {
	r.released = append(r.released, m.Extent)
	return r.refused
}

func (r *rig) stop() {
	if r.job.Err != nil && !r.slow {
		r.land()
	}
}

func (r *rig) land() {
	r.Pump() // a job that has failed has no more turns
}

// begin has the job be under way.
func (r *rig) begin() error {
	d := driver.Desc{Len: 10, LocalKey: r.mem.Key(), RemoteKey: r.key}
	if err := r.peer.Submit(7, &driver.Batch{Op: driver.Read,
		Descs: []driver.Desc{d, d}}); err != nil {
		return err
	}
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if len(r.job.Views) != 1 || r.job.Views[0].Local.Extent != 1 ||
		r.job.Views[0].Remote.Extent != 2 {
		r.t.Errorf("views %+v", r.job.Views)
	}
	return nil
}

func (r *rig) underWay() bool {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	return r.job.by != nil
}

// TestEnds: whatever takes a job its right to be under way returns when it is not.
func TestEnds(t *testing.T) {
	for name, v := range map[string]struct {
		end   func(r *rig) error
		after error // of the next job
	}{
		"revoke of file": {func(r *rig) error {
			return r.file.Revoke(t.Context())
		}, driver.ErrRevoked},
		"revoke of memory": {func(r *rig) error {
			return r.mem.Revoke(t.Context())
		}, driver.ErrBounds},
		"close of peer": {func(r *rig) error { return r.peer.Close() }, driver.ErrClosed},
		"close": {func(r *rig) error {
			return r.Flights.Close(func() error { return nil })
		}, driver.ErrClosed},
		"cancel": {func(r *rig) error { r.peer.Cancel(7); return nil }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			require.NoError(t, r.begin())
			if err := v.end(r); err != nil {
				t.Error(err)
			}
			if r.underWay() {
				t.Error("the job is under way still")
			}
			if err := r.begin(); !errors.Is(err, v.after) {
				t.Errorf("the next job: %v, want %v", err, v.after)
			}
		})
	}
}

// TestLeavesOthersAlone: a revoke of one memory is nothing to those that do not use it.
func TestLeavesOthersAlone(t *testing.T) {
	r := newRig(t)
	other := r.register(driver.Segment{Kind: driver.File, Len: 100, FD: 0}, 3)
	require.NoError(t, r.begin())
	r.peer.Cancel(8)
	if err := other.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
	if !r.underWay() {
		t.Error("a job was ended that did not use the memory")
	}
	if !slices.Equal(r.released, []int{3}) {
		t.Errorf("released %v", r.released)
	}
}

// TestRevokeWaits for what does not end at once, no longer than its context.
func TestRevokeWaits(t *testing.T) {
	r := newRig(t)
	r.slow = true
	require.NoError(t, r.begin())
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := r.file.Revoke(ctx); !errors.Is(err, driver.ErrTimeout) {
		t.Errorf("a Revoke while nothing ends: %v", err)
	}
	over := make(chan error)
	go func() { over <- r.file.Revoke(t.Context()) }()
	for waited := false; !waited; time.Sleep(time.Millisecond) {
		r.Mu.Lock()
		waited = r.Waited()
		r.Mu.Unlock()
	}
	select {
	case err := <-over:
		t.Errorf("the Revoke is over while the job is under way: %v", err)
	default:
	}
	r.Mu.Lock()
	r.land()
	r.Mu.Unlock()
	if err := <-over; err != nil {
		t.Error(err)
	}
}

// TestRevokeThatFailedKeepsItsKey: no other memory has the key of memory whose Revoke has failed,
// and nil says that it was given back.
func TestRevokeThatFailedKeepsItsKey(t *testing.T) {
	r := newRig(t)
	r.refused = unix.EIO
	require.ErrorIs(t, r.file.Revoke(context.Background()), unix.EIO)
	other := r.register(driver.Segment{Kind: driver.File, Len: 100, FD: 0}, 3)
	token := r.token(other)
	_, _, err := r.peer.Import(token)
	require.NoError(t, err, "a token of memory that was not revoked")
	require.ErrorIs(t, r.file.Revoke(context.Background()), unix.EIO)
	r.refused = nil
	require.NoError(t, r.file.Revoke(context.Background()))
	require.NoError(t, r.file.Revoke(context.Background()))
	require.Equal(t, []int{2, 2, 2}, r.released)
	r.refused = unix.EIO
	require.ErrorIs(t, other.Revoke(context.Background()), unix.EIO)
	r.refused = nil
	require.NoError(t, r.Flights.Close(func() error { return nil }))
	require.Contains(t, r.released[4:], 3, "the backend has closed, and memory was not given back")
}

func TestTokens(t *testing.T) {
	r := newRig(t)
	before := r.token(r.file)
	require.NoError(t, r.file.Revoke(t.Context()))
	if _, _, err := r.peer.Import(before); !errors.Is(err, driver.ErrRevoked) {
		t.Errorf("a token of revoked memory: %v", err)
	}
	if _, _, err := r.peer.Import(r.token(r.mem)); !errors.Is(err, driver.ErrNotSupported) {
		t.Errorf("a token of what is no file: %v", err)
	}
	other := newRig(t)
	if _, _, err := r.peer.Import(other.token(other.file)); !errors.Is(err, driver.ErrBadToken) ||
		!errors.Is(err, driver.ErrNotSupported) {
		t.Errorf("a token of another backend: %v", err)
	}
	if err := r.Connect(t.Context(), other.Addr(), &Peer[int]{}); !errors.Is(err,
		driver.ErrNotSupported) {
		t.Errorf("connect to another backend: %v", err)
	}
	r.peer.Drop(r.key)
	if err := r.begin(); !errors.Is(err, driver.ErrBounds) || r.peer.Imported(r.key) != nil {
		t.Errorf("a key that was dropped: %v", err)
	}
}

func TestTurns(t *testing.T) {
	q := newTurns[int](2)
	a, b := new(int), new(int)
	q.push(a)
	q.push(b)
	for range 5 {
		for _, want := range []*int{a, b} {
			got := q.pop()
			if got != want || q.n != 1 {
				t.Fatal("out of turn")
			}
			q.push(got)
		}
	}
}

func TestAdmit(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(name, make([]byte, 4096), 0o600))
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
		f, err := os.OpenFile(name, v.flags, 0)
		require.NoError(t, err)
		v.seg.FD = int(f.Fd())
		id, err := Admit(&v.seg)
		if !errors.Is(err, v.want) {
			t.Errorf("flags %#x, [%d, +%d): %v, want %v", v.flags, v.seg.FileOff, v.seg.Len, err,
				v.want)
		}
		if err == nil && id.Name(v.seg.FD) != name {
			t.Errorf("its name is %q", id.Name(v.seg.FD))
		}
		require.NoError(t, f.Close())
	}
	if _, err := Admit(&driver.Segment{FD: -1}); !errors.Is(err, unix.EBADF) {
		t.Errorf("no descriptor: %v", err)
	}
}

func TestReopenedIsOurs(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "file")
	require.NoError(t, err)
	theirs, _, err := Examine(int(f.Fd()))
	require.NoError(t, err)
	fd, err := Reopen(int(f.Fd()), os.O_RDONLY)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, f.Close())
	ours, _, err := Examine(fd)
	if err != nil || !ours.SameFile(theirs) || ours == theirs {
		t.Errorf("%+v, %v, want %+v read-only", ours, err, theirs)
	}
}

// TestRegisterBesideClose: what Register finds while Close runs is given back.
func TestRegisterBesideClose(t *testing.T) {
	r := newRig(t)
	closed := make(chan error, 1)
	_, err := r.Register(&driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)},
		func(m *Memory[int]) error {
			m.Extent = 7
			go func() { closed <- r.Flights.Close(func() error { return nil }) }()
			for r.Gate.Enter() { // Close has listed the memories when it shuts the gate
				r.Gate.Exit()
				runtime.Gosched()
			}
			return nil
		})
	if !errors.Is(err, driver.ErrClosed) {
		t.Errorf("register while the backend closes: %v", err)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if !slices.Contains(r.released, 7) {
		t.Error("the backend has closed, and memory was not given back")
	}
}

// TestWhoComesBesideARevokeWaits: a second and third Revoke answer nothing before the job that the
// first waits for has ended.
func TestWhoComesBesideARevokeWaits(t *testing.T) {
	r := newRig(t)
	require.NoError(t, r.begin())
	r.Mu.Lock()
	r.slow = true
	r.Mu.Unlock()
	closed := make(chan error, 2)
	for i := range 2 {
		go func() { closed <- r.file.Revoke(context.Background()) }()
		for waiters := 0; waiters <= i; runtime.Gosched() {
			r.Mu.Lock()
			waiters = r.waiters
			r.Mu.Unlock()
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, r.file.Revoke(ctx), driver.ErrTimeout)
	require.Empty(t, closed)
	r.Mu.Lock()
	r.slow = false
	r.land()
	r.Mu.Unlock()
	require.NoError(t, <-closed)
	require.NoError(t, <-closed)
	require.Len(t, r.released, 1)
}
