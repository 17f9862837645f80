// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package gds

import (
	"context"
	"errors"
	"io"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// wantFileError wants an error to say which piece failed, how, and where.
func wantFileError(t *testing.T, err error, piece int, op string, off int64, cause error) {
	t.Helper()
	var p *driver.PieceError
	var f *driver.FileError
	if !errors.As(err, &p) || !errors.As(err, &f) || !errors.Is(err, cause) {
		t.Fatalf("%v: want a *PieceError of a *driver.FileError of %v", err, cause)
	}
	if p.Piece != piece || f.Op != op || f.Off != off && off >= 0 {
		t.Errorf("%v: want piece %d, %s, byte %d", err, piece, op, off)
	}
}

// TestEndOfFile has the file end in the middle of a batch: the error names piece and byte. A write
// that cuFile ends within a block goes on through the page cache.
func TestEndOfFile(t *testing.T) {
	onStandIn(t)
	eachWay(t, func(t *testing.T, cfg Config) {
		const size, end = 1 << 20, 300<<10 + 123
		r := newRig(t, cfg, size)
		library.Set(t, "end_at", end)
		pieces := []driver.Desc{{Len: 64 << 10}, {Local: 64 << 10, Remote: 64 << 10,
			Len: 100 << 10},
			{Local: 164 << 10, Remote: 164 << 10, Len: 200 << 10},
			{Local: 600 << 10, Remote: 16 << 10, Len: 4096}}
		wantFileError(t, r.move(driver.Read, pieces...), 2, "read", end, io.ErrUnexpectedEOF)
		require.NoError(t, r.move(driver.Write, pieces[:3]...))
		r.same("behind the end", r.content()[:364<<10], r.memory()[:364<<10])
		library.Put("end_at", 300<<10)
		wantFileError(t, r.move(driver.Write, pieces...), 2, "write", 300<<10, io.ErrShortWrite)
		library.Put("end_at", end)
		require.NoError(t, r.move(driver.Read, driver.Desc{Len: end}), "of what is there")
	})
}

// TestOneFails has one of many requests fail: the batch ends with that piece, and the next one
// works.
func TestOneFails(t *testing.T) {
	onStandIn(t)
	eachWay(t, func(t *testing.T, cfg Config) {
		cfg.Threads, cfg.PieceMax = 1, 64<<10
		r := newRig(t, cfg, 2<<20)
		var pieces []driver.Desc
		for i := range uint64(16) {
			pieces = append(pieces, driver.Desc{Local: i * 100 << 10, Remote: (15 - i) * 100 << 10,
				Len: 10 << 10})
		}
		for _, c := range []struct {
			code  uint32
			cause error
		}{{uint32(syscall.EIO), syscall.EIO}, {uint32(syscall.ENOSPC), syscall.ENOSPC},
			{5008, nil}} {
			library.Set(t, "fail_code", c.code)
			library.Put("fail_after", 6)
			err := r.move(driver.Write, append([]driver.Desc{}, pieces...)...)
			if c.cause != nil {
				wantFileError(t, err, pieceOf(err), "write", -1, c.cause)
			}
			var said *cufile.Error
			if c.cause == nil && (!errors.As(err, &said) || said.Code != 5008 ||
				!strings.Contains(err.Error(), "not supported for this file")) {
				t.Errorf("%v, want cuFile's 5008", err)
			}
			require.NoError(t, r.move(driver.Write, pieces...), "after a failure")
		}
	})
}

func pieceOf(err error) int {
	var p *driver.PieceError
	if errors.As(err, &p) {
		return p.Piece
	}
	return -1
}

// TestStatuses has an entry of a batch end with each status that is no success.
func TestStatuses(t *testing.T) {
	onStandIn(t)
	r := newRig(t, Config{Way: WayBatch, Threads: 1}, 1<<20)
	for status, cause := range map[uint32]error{0x04: syscall.EINVAL, 0x20: syscall.ETIMEDOUT,
		0x40: syscall.EIO} {
		library.Set(t, "fail_code", uint32(map[bool]syscall.Errno{true: syscall.EINVAL,
			false: syscall.EIO}[status == 0x04]))
		library.Set(t, "fail_status", status)
		library.Put("fail_after", 1)
		err := r.move(driver.Write, driver.Desc{Len: 4096}, driver.Desc{Local: 64 << 10,
			Remote: 64 << 10, Len: 4096},
			driver.Desc{Local: 256 << 10, Remote: 256 << 10, Len: 4096})
		require.ErrorIs(t, err, cause, "status %#x", status)
		require.Zero(t, library.Get("under_way"), "status %#x: told while requests are under way",
			status)
		require.NoError(t, r.move(driver.Read, driver.Desc{Len: 1 << 20}), "after status %#x",
			status)
	}
	library.Put("status_result", 5030)
	if err := r.move(driver.Read, driver.Desc{Len: 4096}, driver.Desc{Local: 64 << 10,
		Remote: 64 << 10, Len: 4096}); !errors.Is(err, syscall.EIO) {
		t.Errorf("a batch that the library does not tell of: %v", err)
	}
	require.Zero(t, library.Get("under_way"), "requests are under way")
}

// TestCancelThatIsRefused has the library not tell of a batch, or tell that an entry has timed out,
// and refuse to cancel it: nothing completes while it may be under way.
func TestCancelThatIsRefused(t *testing.T) {
	onStandIn(t)
	pieces := []driver.Desc{{Len: 4096}, {Local: 64 << 10, Remote: 64 << 10, Len: 4096}}
	for _, late := range []bool{false, true} {
		r := newRig(t, Config{Way: WayBatch, Threads: 1}, 1<<20)
		library.Set(t, "cancel_refused", 1<<30)
		want := error(nil)
		if late {
			library.Set(t, "fail_status", 0x20)
			library.Put("fail_after", 1)
			want = syscall.ETIMEDOUT
		} else {
			library.Set(t, "hold", 1)
			library.Put("status_result", 5030)
		}
		r.submit(driver.Write, 1, pieces...)
		r.until("a cancel", func() bool { return library.Get("cancel_refused") < 1<<30 })
		r.none()
		library.Put("hold", 0)
		if late {
			library.Put("cancel_refused", 1)
		}
		require.ErrorIs(t, r.outcome(1), want)
		require.Zero(t, library.Get("under_way"), "requests are under way")
		library.Put("cancel_refused", 0)
		require.NoError(t, r.move(driver.Read, pieces...))
	}
}

// TestBatchLimit has the library take fewer entries than it says, or none:
// transfers work all the same, and Explain says so.
func TestBatchLimit(t *testing.T) {
	onStandIn(t)
	const size = 4 << 20
	scattered := func() (list []driver.Desc) {
		for i := range uint64(512) {
			list = append(list, driver.Desc{Local: i * 8192, Remote: i * 8192, Len: 4096})
		}
		return list
	}
	for _, c := range []struct {
		name  string
		cfg   Config
		word  string
		value uint32
	}{{"three entries", Config{Way: WayBatch}, "batch_limit", 3},
		{"one entry", Config{Way: WayBatch, Depth: 100}, "batch_limit", 1},
		{"no batch", Config{Way: WayBatch}, "batch_result", 5036}} {
		t.Run(c.name, func(t *testing.T) {
			testkit.CheckLeaks(t)
			r := newRig(t, c.cfg, size)
			library.Set(t, c.word, c.value)
			require.NoError(t, r.move(driver.Read, scattered()...))
			mem, text := r.memory(), r.content()
			for _, d := range scattered() {
				r.same("an entry", mem[d.Local:][:d.Len], text[d.Remote:][:d.Len])
			}
			if text := r.p.Explain(r.local, r.far); !strings.Contains(text, "took less at a time") {
				t.Errorf("explained as %q", text)
			}
		})
	}
}

// TestNotDeregistered has the library not give memory up: Revoke says so, and tries again. Other
// memory at those addresses is not taken for the one that the library knows: that gives way first,
// and a later Revoke of it leaves the other alone.
func TestNotDeregistered(t *testing.T) {
	onStandIn(t)
	r := newRig(t, Config{}, 1<<20)
	library.Set(t, "deregister_result", 5030)
	require.Error(t, r.l.Revoke(t.Context()))
	require.Error(t, r.l.Revoke(t.Context()))
	_, err := r.b.Register(r.dev.Segment)
	require.ErrorContains(t, err, "closed here")
	library.Put("deregister_result", 0)
	again, err := r.b.Register(r.dev.Segment)
	require.NoError(t, err)
	require.True(t, again.(*files.Memory).Own.(*buffer).registered())
	known, bytes := library.Get("buffers"), buffers.bytes
	require.NoError(t, r.l.Revoke(t.Context()))
	require.Equal(t, known, library.Get("buffers"))
	require.Equal(t, bytes, buffers.bytes)
	require.NoError(t, again.Revoke(t.Context()))
	require.Zero(t, library.Get("buffers"))
}

// TestNotRegistered has the library refuse to register memory, or there be no room for it: it is
// moved all the same.
func TestNotRegistered(t *testing.T) {
	onStandIn(t)
	for name, c := range map[string]struct {
		cfg    Config
		result uint32
		why    string
	}{"refused": {Config{}, 5036, "no room to pin memory"}, "limited": {Config{BufferMax: 64 << 10},
		0, "BufferMax"}} {
		t.Run(name, func(t *testing.T) {
			library.Set(t, "register_result", c.result)
			r := newRig(t, c.cfg, 1<<20)
			require.NoError(t, r.move(driver.Read, driver.Desc{Len: 1 << 20}))
			r.same("read without registration", r.memory(), r.content())
			if text := r.p.Explain(r.local, r.far); !strings.Contains(text,
				"memory not registered") || !strings.Contains(text, c.why) {
				t.Errorf("explained as %q", text)
			}
		})
	}
	t.Run("file", func(t *testing.T) {
		r := newRig(t, Config{}, 4096)
		f := newRig(t, Config{}, 8192)
		library.Set(t, "handle_result", 5008)
		_, err := r.b.Register(driver.Segment{Kind: driver.File, Len: 4096, FD: int(f.f.Fd())})
		var said *cufile.Error
		if !errors.As(err, &said) || said.Code != 5008 {
			t.Errorf("a file that cuFile does not take: %v", err)
		}
	})
}

// TestPartsAreOneBuffer registers memory, parts of it, and it once more: cuFile knows it once.
func TestPartsAreOneBuffer(t *testing.T) {
	onStandIn(t)
	r := newRig(t, Config{}, 1<<20)
	before := library.Get("buffers")
	var parts []driver.Memory
	for _, n := range []uint64{4096, 1 << 20} {
		seg, err := r.dev.Segment.Slice(1<<20-n, n, [16]byte{1})
		require.NoError(t, err)
		m, err := r.b.Register(seg)
		require.NoError(t, err)
		parts = append(parts, m)
	}
	require.EqualValues(t, before, library.Get("buffers"), "buffers, and with parts")
	r.local = parts[0].Key()
	require.NoError(t, r.move(driver.Read, driver.Desc{Remote: 77, Len: 4096}))
	r.same("a part", r.memory()[1<<20-4096:], r.content()[77:77+4096])
	for _, m := range append(parts, r.l) {
		require.NoError(t, m.Revoke(context.Background()))
	}
	require.EqualValues(t, before-1, library.Get("buffers"), "buffers after all are closed")
}

// TestRevokeOfWhatHangs has the library not answer: a revoke gives up when its context ends and
// says so, a cancel takes away what has not begun, and nothing completes before it is known to be
// over.
func TestRevokeOfWhatHangs(t *testing.T) {
	onStandIn(t)
	eachWay(t, func(t *testing.T, cfg Config) {
		testkit.CheckLeaks(t)
		cfg.Depth, cfg.PieceMax, cfg.Threads = 8, 64<<10, 1
		r := newRig(t, cfg, 4<<20)
		library.Set(t, "hold", 1)
		r.submit(driver.Read, 1, driver.Desc{Len: 4 << 20})
		r.until("the first request", func() bool { return library.Get("under_way") > 0 })
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		if err := r.m.Revoke(ctx); !errors.Is(err, driver.ErrTimeout) ||
			!strings.Contains(err.Error(), "has not answered") {
			t.Errorf("revoke of what hangs: %v", err)
		}
		r.none()
		before := library.Get("reads") + library.Get("submits")
		library.Put("hold", 0)
		require.ErrorIs(t, r.outcome(1), driver.ErrRevoked, "the outcome of a revoked batch")
		require.Zero(t, library.Get("under_way"), "requests are under way")
		mem := r.memory()
		for range 20 {
			runtime.Gosched()
			time.Sleep(time.Millisecond)
		}
		r.same("after the outcome", r.memory(), mem)
		if after := library.Get("reads") + library.Get("submits"); after >
			before+8 {
			t.Errorf("%d calls after the revoke", after-before)
		}
		require.NoError(t, r.m.Revoke(t.Context()))
		var err error
		r.m, err = r.b.Register(driver.Segment{Kind: driver.File, Len: 4 << 20,
			FD: int(r.f.Fd())})
		require.NoError(t, err)
		r.far = r.imported()
		require.NoError(t, r.move(driver.Read, driver.Desc{Len: 4 << 20}))
	})
}
