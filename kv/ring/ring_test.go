// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// over is a context that has ended: Reserve does not wait.
var over = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func openRing(t *testing.T, cfg Config) *Writer {
	t.Helper()
	if cfg.Path == "" {
		cfg.Path = filepath.Join(t.TempDir(), "ring")
	}
	w, err := Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.Close() }) // a test may have closed it
	return w
}

func joinRing(t *testing.T, w *Writer) *Reader {
	t.Helper()
	r, err := Join(t.Context(), w.cfg.Path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.Close() }) // a test may have closed it
	return r
}

func filled(n int, b byte) []byte { return slices.Repeat([]byte{b}, n) }

func put(t *testing.T, w *Writer, key string, n int, b byte) Handle {
	t.Helper()
	h, err := w.Put(over, key, filled(n, b))
	require.NoError(t, err)
	return h
}

// got gets an object and lets it go.
func got(t *testing.T, r *Reader, h Handle) []byte {
	t.Helper()
	o, err := r.Get(h)
	require.NoError(t, err)
	defer func() { require.NoError(t, o.Close()) }()
	return slices.Clone(o.Bytes())
}

func TestPutAndGet(t *testing.T) {
	w := openRing(t, Config{Bytes: 1 << 20, Sums: true, Note: filled(noteMax, 'n')})
	a, b := joinRing(t, w), joinRing(t, w)
	require.Equal(t, filled(noteMax, 'n'), b.Note())
	h, err := w.Put(t.Context(), "image", []byte("pix"), nil, []byte("els"))
	require.NoError(t, err)
	for _, r := range []*Reader{a, b} {
		o, err := r.Get(h)
		require.NoError(t, err)
		require.Equal(t, "pixels", string(o.Bytes()))
		require.Equal(t, 6, cap(o.Bytes()))
		require.NoError(t, o.Verify())
		require.ErrorIs(t, r.Close(), driver.ErrBusy)
		require.NoError(t, o.Close())
		require.NoError(t, o.Close())
		require.ErrorIs(t, o.Verify(), driver.ErrClosed)
	}
	own, err := w.Get(h)
	require.NoError(t, err)
	require.Equal(t, "pixels", string(own.Bytes()))
	require.ErrorIs(t, w.Close(), driver.ErrBusy)
	require.NoError(t, own.Close())
	empty, err := w.Put(t.Context(), "nothing")
	require.NoError(t, err)
	require.Empty(t, got(t, a, empty))
	_, err = w.Put(t.Context(), "image", []byte("other"))
	require.ErrorIs(t, err, ErrKnown)
	_, err = w.Put(t.Context(), "huge", make([]byte, 1<<20+1))
	require.ErrorIs(t, err, driver.ErrBounds)
	for _, h := range []Handle{{}, {Row: h.Row}, {h.Row + 1, h.Generation}, {1 << 31, 5},
		{h.Row, h.Generation + 1}} {
		_, err := a.Get(h)
		require.ErrorIs(t, err, ErrMiss, "%v", h)
	}
	require.NoError(t, w.Close())
	<-a.Gone()
	require.Equal(t, "pixels", string(got(t, a, h)), "what was there can be got still")
	_, err = a.Get(Handle{1, 5})
	require.ErrorContains(t, err, "writer has ended")
	require.NoError(t, a.Close())
	_, err = a.Get(h)
	require.ErrorIs(t, err, driver.ErrClosed)
	_, err = w.Put(t.Context(), "later", nil)
	require.ErrorIs(t, err, driver.ErrClosed)
	require.False(t, w.Remove("image"))
	w.Clear()
	require.Zero(t, w.Stats().Objects)
}

func TestHandleOfAnotherRing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ring")
	w := openRing(t, Config{Path: path, Bytes: 4096})
	old := put(t, w, "a", 100, 1)
	require.NoError(t, w.Close())
	w = openRing(t, Config{Path: path, Bytes: 4096})
	r := joinRing(t, w)
	h := put(t, w, "a", 100, 2)
	require.Equal(t, old.Row, h.Row)
	_, err := r.Get(old)
	require.ErrorIs(t, err, ErrMiss)
	require.Equal(t, filled(100, 2), got(t, r, h))
}

// The objects of a reader that has had all of them go in any order; the handle of one that has gone
// is a miss, also when its row and room are another's.
func TestGoesInAnyOrder(t *testing.T) {
	w := openRing(t, Config{Bytes: 4 * 4096, Objects: 8})
	r := joinRing(t, w)
	var handles []Handle
	for i := range 4 {
		handles = append(handles, put(t, w, fmt.Sprint(i), 4096, byte(i)))
	}
	first, err := r.Get(handles[0])
	require.NoError(t, err)
	require.Equal(t, filled(4096, 2), got(t, r, handles[2]))

	h := put(t, w, "4", 4096, 4) // 0 is held, 1 and 3 are owed
	require.Equal(t, filled(4096, 4), got(t, r, h))
	_, err = r.Get(handles[2])
	require.ErrorIs(t, err, ErrMiss)
	require.Equal(t, filled(4096, 0), first.Bytes())
	require.Equal(t, filled(4096, 1), got(t, r, handles[1]))
	require.Equal(t, filled(4096, 3), got(t, r, handles[3]))
	require.NoError(t, first.Close())

	put(t, w, "5", 8192, 5) // 0 was used least, and 1 beside it
	for i, there := range []bool{false, false, false, true, true, true} {
		_, found := w.Find(fmt.Sprint(i))
		require.Equal(t, there, found, i)
	}
	_, err = w.Put(over, "6", make([]byte, 3*4096))
	require.ErrorIs(t, err, ErrFull) // 5 is owed, and no other three lie side by side
	for _, key := range []string{"3", "4"} {
		_, found := w.Find(key)
		require.True(t, found, "nothing goes in vain")
	}
	require.EqualValues(t, 3, w.Stats().Evicted)
}

func TestRowsAreBounded(t *testing.T) {
	w := openRing(t, Config{Bytes: 1 << 20, Objects: 2})
	put(t, w, "a", 1, 1)
	put(t, w, "b", 1, 2)
	_, known := w.Handle("a")
	require.True(t, known)
	put(t, w, "c", 1, 3)
	_, known = w.Find("b")
	require.False(t, known, "b was used least")
}

func TestWaitsForReaders(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096, Await: 2, Patience: time.Hour})
	h := put(t, w, "a", 4096, 1)
	full := func() {
		t.Helper()
		_, err := w.Put(over, "b", make([]byte, 4096))
		require.ErrorIs(t, err, ErrFull)
		require.ErrorContains(t, err, "1 wait for readers")
	}
	full()
	a := joinRing(t, w)
	full()
	got(t, a, h)
	got(t, a, h)
	full() // one reader that gets twice is not two
	b := joinRing(t, w)
	full()
	late := joinRing(t, w) // was not awaited: nothing is owed to it
	got(t, b, h)
	h2, ok := w.Handle("a") // once more, to all three
	require.True(t, ok)
	require.Equal(t, h, h2)
	got(t, a, h)
	got(t, b, h)
	full()
	require.NoError(t, late.Close()) // nothing is owed to one that has gone
	require.Eventually(t, func() bool { return w.Stats().Readers == 2 }, time.Minute,
		time.Millisecond)
	put(t, w, "b", 4096, 2)
	require.Zero(t, w.Stats().Overdue)
}

func TestPatience(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096, Await: 1, Patience: time.Nanosecond})
	put(t, w, "a", 4096, 1)
	put(t, w, "b", 4096, 2)
	require.EqualValues(t, 1, w.Stats().Overdue)
}

// A program that connects and goes is no reader that was awaited: another writer that looks whether
// somebody listens at the path does, and a Join whose context ends.
func TestAwaitsReaders(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096, Await: 1, Patience: time.Hour})
	h := put(t, w, "a", 4096, 1)
	conn, err := net.Dial("unixpacket", w.cfg.Path)
	require.NoError(t, err)
	_, err = conn.Read(make([]byte, 1)) // it has a seat
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.Eventually(t, func() bool { return w.Stats().Readers == 0 }, time.Minute,
		time.Millisecond)
	_, err = w.Put(over, "b", make([]byte, 4096))
	require.ErrorIs(t, err, ErrFull)
	require.Equal(t, filled(4096, 1), got(t, joinRing(t, w), h))
	put(t, w, "b", 4096, 2)
}

// A reader whose connection ends and that lives on keeps what it holds. Once that is nothing it has
// lost its seat, and is told.
func TestConnectionEnds(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	r := joinRing(t, w)
	h := put(t, w, "a", 4096, 1)
	o, err := r.Get(h)
	require.NoError(t, err)
	require.NoError(t, r.conn.Close())
	left := func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.seats[0].left
	}
	require.Eventually(t, left, time.Minute, time.Millisecond)
	_, err = w.Put(over, "b", make([]byte, 4096))
	require.ErrorIs(t, err, ErrFull)
	require.NoError(t, o.Close())
	require.Eventually(t, func() bool { return w.Stats().Readers == 0 }, time.Minute,
		time.Millisecond)
	_, err = r.Get(h)
	require.ErrorIs(t, err, ErrRevoked)
	put(t, w, "b", 4096, 2)
}

// A Reserve beside Close leaves a Draft, so that the ring stays open, or is refused.
func TestReserveBesideClose(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	d, err := w.Reserve(over, "a", 9)
	require.NoError(t, err)
	require.ErrorIs(t, w.Close(), driver.ErrBusy)
	d.Drop()
	s := testpoint.Stand(t, "ring: closing")[0]
	var other sync.WaitGroup
	other.Go(func() { assert.NoError(t, w.Close()) })
	<-s.Came
	_, err = w.Reserve(over, "a", 9)
	require.ErrorIs(t, err, driver.ErrClosed)
	s.GoOn()
	other.Wait()
}

// The end of a writer is told also where a child of it has its connections still, and that of a
// reader, too.
func TestEndBesideChildren(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	r, stays := joinRing(t, w), joinRing(t, w)
	dup := func(conn *net.UnixConn) {
		f, err := conn.File()
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
	}
	w.mu.Lock()
	for conn := range w.conns {
		dup(conn)
	}
	w.mu.Unlock()
	dup(r.conn)
	require.NoError(t, r.Close())
	require.Eventually(t, func() bool { return w.Stats().Readers == 1 }, time.Minute,
		time.Millisecond)
	require.NoError(t, w.Close())
	<-stays.Gone()
}

func TestTouch(t *testing.T) {
	w := openRing(t, Config{Bytes: 2 * 4096})
	put(t, w, "a", 4096, 1)
	put(t, w, "b", 4096, 1)
	require.True(t, w.Touch("a"))
	require.False(t, w.Touch("z"))
	put(t, w, "c", 4096, 1)
	require.True(t, w.Touch("c"))
	_, err := w.Put(over, "d", make([]byte, 4096))
	require.ErrorContains(t, err, "2 are touched")
	_, ok := w.Handle("a") // ends its touch
	require.True(t, ok)
	put(t, w, "d", 4096, 1)
	w.EndTouches()
	put(t, w, "e", 8192, 1)
}

func TestRemove(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	r := joinRing(t, w)
	h := put(t, w, "a", 4096, 1)
	o, err := r.Get(h)
	require.NoError(t, err)
	require.True(t, w.Remove("a"))
	require.False(t, w.Remove("a"))
	_, err = r.Get(h)
	require.ErrorIs(t, err, ErrMiss)
	_, err = w.Put(over, "a", make([]byte, 4096))
	require.ErrorIs(t, err, ErrFull)
	require.ErrorContains(t, err, "reader 0")
	require.Equal(t, filled(4096, 1), o.Bytes())
	require.NoError(t, o.Close())
	put(t, w, "a", 4096, 2)
	w.Clear()
	d, err := w.Reserve(over, "b", 4096)
	require.NoError(t, err)
	require.False(t, w.Remove("b"), "it is not there yet")
	d.Drop()
	d.Drop()
	put(t, w, "b", 4096, 2)
	w.Clear()
	d, err = w.Reserve(over, "c", 4096)
	require.NoError(t, err)
	copy(d.Bytes(), filled(4096, 3))
	h = d.Commit()
	d.Drop() // as a program that defers it
	require.Equal(t, filled(4096, 3), got(t, r, h))
	require.Zero(t, w.Stats().Free)
}

// A Reserve that finds no room sleeps until a reader lets go, and no longer than its context.
func TestBackPressure(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	r := joinRing(t, w)
	o, err := r.Get(put(t, w, "a", 4096, 1))
	require.NoError(t, err)
	var both sync.WaitGroup
	both.Go(func() {
		for w.head.waits.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		assert.NoError(t, o.Close())
	})
	_, err = w.Put(t.Context(), "b", make([]byte, 4096))
	require.NoError(t, err)
	both.Wait()
	require.Zero(t, w.head.waits.Load())

	h, _ := w.Find("b")
	o, err = r.Get(h)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = w.Put(ctx, "c", make([]byte, 4096))
	require.ErrorIs(t, err, ErrFull)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, fmt.Sprintf("reader 0 (process %d) holds 1 of 4096 bytes",
		os.Getpid()))

	both.Go(func() {
		for w.head.waits.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		assert.NoError(t, w.Close())
	})
	_, err = w.Put(t.Context(), "c", make([]byte, 4096))
	require.ErrorIs(t, err, driver.ErrClosed)
	both.Wait()
	require.NoError(t, o.Close())
}

// A reader that has raised its word, and one that has not, beside the writer that takes the object
// away: whoever comes second sees the other.
func TestGetBesideEvict(t *testing.T) {
	for _, point := range []string{"ring: raised", "ring: taken away"} {
		t.Run(point, func(t *testing.T) {
			w := openRing(t, Config{Bytes: 4096})
			r := joinRing(t, w)
			h := put(t, w, "a", 4096, 1)
			got(t, r, h)
			s := testpoint.Stand(t, point)[0]
			var err error
			var o *View
			var other sync.WaitGroup
			if point == "ring: raised" {
				other.Go(func() { o, err = r.Get(h) })
				<-s.Came
				_, full := w.Put(over, "b", make([]byte, 4096))
				require.ErrorIs(t, full, ErrFull)
				s.GoOn()
				other.Wait()
				require.NoError(t, err)
				require.Equal(t, filled(4096, 1), o.Bytes())
				require.NoError(t, o.Close())
				put(t, w, "b", 4096, 2)
				return
			}
			other.Go(func() { _, err = w.Put(over, "b", filled(4096, 2)) })
			<-s.Came
			_, miss := r.Get(h)
			require.ErrorIs(t, miss, ErrMiss)
			s.GoOn()
			other.Wait()
			require.NoError(t, err)
			_, miss = r.Get(h)
			require.ErrorIs(t, miss, ErrMiss)
		})
	}
}

// A reader that has got an object since the writer chose it keeps it.
func TestGetBesideChoice(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	r := joinRing(t, w)
	h := put(t, w, "a", 4096, 1)
	got(t, r, h)
	s := testpoint.Stand(t, "ring: chosen")[0]
	var full error
	var other sync.WaitGroup
	other.Go(func() { _, full = w.Put(over, "b", filled(4096, 2)) })
	<-s.Came
	o, err := r.Get(h)
	require.NoError(t, err)
	s.GoOn()
	other.Wait()
	require.ErrorIs(t, full, ErrFull)
	require.Equal(t, filled(4096, 1), o.Bytes())
	require.NoError(t, o.Close())
	require.Equal(t, filled(4096, 1), got(t, r, h), "it has its generation again")
}

// A reader that lets go of an object rings where the writer waits.
func TestDoorbell(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096, Await: 1})
	r := joinRing(t, w)
	o, err := r.Get(put(t, w, "a", 4096, 1))
	require.NoError(t, err)
	require.Eventually(t, func() bool { // the word of its Join has come
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.awaited == 0
	}, time.Minute, time.Millisecond)
	w.head.waits.Store(1)
	w.mu.Lock()
	changed := w.changed
	w.mu.Unlock()
	require.NoError(t, o.Close())
	select {
	case <-changed:
	case <-time.After(time.Minute):
		t.Fatal("the writer was not told")
	}
}

// Nonsense in the words of a reader keeps objects, or lets those go that it was to get. The bytes
// that others hold stay.
func TestNonsenseInWords(t *testing.T) {
	w := openRing(t, Config{Bytes: 2 * 4096, Patience: time.Hour})
	good, bad := joinRing(t, w), joinRing(t, w)
	a, b := put(t, w, "a", 4096, 1), put(t, w, "b", 4096, 2)
	held, err := good.Get(a)
	require.NoError(t, err)
	for i := range bad.words {
		bad.words[i].holds.Store(0xdeadbeef)
		bad.words[i].reads.Store(0xdeadbeef)
	}
	_, err = w.Put(over, "c", make([]byte, 4096))
	require.ErrorIs(t, err, ErrFull)
	for i := range bad.words {
		bad.words[i].holds.Store(0)
		bad.words[i].reads.Store(0x7fffffff)
	}
	require.Equal(t, filled(4096, 2), got(t, good, b))
	put(t, w, "c", 4096, 3)
	require.Equal(t, filled(4096, 1), held.Bytes())
	require.NoError(t, held.Close())
}

func TestSeats(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096, Readers: 1})
	r := joinRing(t, w)
	_, err := join(t.Context(), w.cfg.Path)
	require.ErrorIs(t, err, driver.ErrBusy)
	require.ErrorContains(t, err, "raise Config.Readers")
	require.NoError(t, r.Close())
	r = joinRing(t, w) // once the seat is free
	require.Equal(t, filled(9, 9), got(t, r, put(t, w, "a", 9, 9)))
	for _, cfg := range []Config{{}, {Path: "x"}, {Path: "x", Bytes: 1, Objects: -1},
		{Path: "x", Bytes: 1, Readers: 65}, {Path: "x", Bytes: 1, Readers: 1, Await: 2},
		{Path: "x", Bytes: 1, Patience: -1}, {Path: "x", Bytes: 1, Note: make([]byte, 513)},
		{Path: "x", Bytes: 64 << 40}} { // the last one: more than a machine has
		_, err := Open(cfg)
		require.ErrorIs(t, err, driver.ErrBounds, "%+v", cfg)
	}
	_, err = Open(w.cfg)
	require.Error(t, err, "another program listens there")
}

// The memory of a reader cannot be written to, and neither can it be mapped anew so.
func TestReadersCannotWrite(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	r := joinRing(t, w)
	o, err := r.Get(put(t, w, "a", 4096, 1))
	require.NoError(t, err)
	for _, write := range []func(){func() { o.Bytes()[0] = 2 }, func() { r.rows[0].length = 2 }} {
		var err error
		func() {
			defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
			write()
		}()
		require.ErrorIs(t, err, driver.ErrFault)
	}
	require.NoError(t, o.Close())
	for _, fd := range []int{w.tableFD, w.dataFD} { // which a reader receives
		_, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		require.ErrorIs(t, err, unix.EPERM)
	}
}

func TestNoLeak(t *testing.T) {
	testkit.CheckLeaks(t)
	w := openRing(t, Config{Bytes: 1 << 20})
	for range 20 {
		r := joinRing(t, w)
		h, known := w.Handle("a")
		if !known {
			h = put(t, w, "a", 100, 1)
		}
		got(t, r, h)
		require.NoError(t, r.Close())
	}
	require.NoError(t, w.Close())
}

func TestGetAllocatesAView(t *testing.T) {
	w := openRing(t, Config{Bytes: 1 << 20})
	r := joinRing(t, w)
	h := put(t, w, "a", 100, 1)
	require.LessOrEqual(t, testkit.AllocsPerRun(100, func() {
		o, err := r.Get(h)
		if err == nil {
			err = o.Close()
		}
		if err != nil {
			panic(err)
		}
	}), 1.0)
}

func TestHoldBesideEvict(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096})
	r := joinRing(t, w)
	h := put(t, w, "a", 4096, 1)
	o := w.objects["a"]
	var held *View
	gone := false
	testkit.OneSideSees(t, func() (saw bool) {
		var err error
		held, err = r.Get(h)
		return err != nil
	}, func() (saw bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.rows[o.row].generation.Swap(0)
		gone = !w.isHeld(o)
		return !gone
	}, func() {
		if held != nil {
			_ = held.Close()
		}
		w.rows[o.row].generation.Store(o.generation)
	})
}
