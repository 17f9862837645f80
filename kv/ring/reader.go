// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Handle names an object of one writer, for its readers. It may travel any way.
type Handle struct {
	Row        uint32
	Generation uint64
}

// The errors of this package. Others are those of package driver, as ErrClosed.
var (
	// ErrMiss: the object of a handle has gone, or the handle is of another writer.
	ErrMiss = errors.New("no such object: it has gone, or the handle is of another ring")
	// ErrRevoked: this reader was stopped for longer than Config.Frozen, or its connection has
	// ended while it held nothing, and its seat was taken away. What it held may have other bytes
	// since.
	ErrRevoked = fmt.Errorf("this reader was stopped for too long, or its connection has ended, "+
		"and it has lost its seat: what it held may have changed: join again: %w",
		driver.ErrRevoked)
)

// member is what a process that reads has of a ring: a Reader, or the writer, of its own objects.
type member struct {
	head  *head
	rows  []row
	words []word
	data  []byte
	sums  bool
	seat  int // -1: the writer's own, which nobody takes away
	epoch uint64

	open atomic.Int64 // Views; below zero: closed
	ring func()       // tells the writer that there may be room
}

// View is an object that stays where it is until Close. Its methods may be called by any goroutine.
type View struct {
	of     *member
	word   *word
	bytes  []byte
	sum    uint32
	closed atomic.Bool
}

// get holds the object of a handle.
func (m *member) get(h Handle) (*View, error) {
	if m.open.Add(1) <= 0 {
		m.open.Add(-1)
		return nil, driver.ErrClosed
	}
	o, err := m.hold(h)
	if err != nil {
		m.open.Add(-1)
		return nil, err
	}
	return o, nil
}

func (m *member) hold(h Handle) (*View, error) {
	if uint64(h.Row) >= uint64(len(m.rows)) || h.Generation == 0 {
		return nil, ErrMiss
	}
	r, w := &m.rows[h.Row], &m.words[h.Row]
	if r.generation.Load() != h.Generation {
		return nil, m.why(w, ErrMiss)
	}
	w.holds.Add(1)
	testpoint.At("ring: raised")
	if r.generation.Load() != h.Generation {
		m.letGo(w)
		return nil, m.why(w, ErrMiss)
	}
	at, length, sum := r.at, r.length, r.sum
	w.reads.Add(1)
	if m.lost(w) { // they may be those of another object
		m.letGo(w)
		return nil, ErrRevoked
	}
	if size := uint64(len(m.data)); length > size || at > size-length {
		m.letGo(w)
		return nil, fmt.Errorf("object at %d of %d bytes, the ring has %d: %w", at, length, size,
			driver.ErrCorrupt)
	}
	return &View{of: m, word: w, bytes: m.data[at : at+length : at+length], sum: sum}, nil
}

// lost reports whether the writer has taken the seat away, and what was read of the ring before may
// be anything. The change of the word keeps the processor from asking before it has read.
func (m *member) lost(w *word) bool {
	if m.seat < 0 {
		return false
	}
	w.holds.Add(0)
	return m.head.seats[m.seat].Load() != m.epoch
}

func (m *member) why(w *word, err error) error {
	if m.lost(w) {
		return ErrRevoked
	}
	return err
}

// letGo is what the writer sees first and is told next, if it waits.
func (m *member) letGo(w *word) {
	w.holds.Add(^uint32(0))
	if m.head.waits.Load() != 0 {
		m.ring()
	}
}

// close ends the view if there are no Views.
func (m *member) close() error {
	if m.open.CompareAndSwap(0, math.MinInt64/2) {
		return nil
	}
	if n := m.open.Load(); n > 0 {
		return fmt.Errorf("close ring: %d views are open: close them first: %w", n, driver.ErrBusy)
	}
	return driver.ErrClosed
}

// Bytes are the object's, until Close. They are the ring's memory, which cannot be written to: a
// program that does ends by SIGSEGV.
func (o *View) Bytes() []byte { return o.bytes }

// Verify compares the CRC-32C of the bytes with the one taken by Commit. Another one is
// driver.ErrCorrupt, and a ring without Config.Sums driver.ErrNotSupported.
func (o *View) Verify() error {
	if !o.of.sums {
		return fmt.Errorf("verify an object of a ring without Config.Sums: %w",
			driver.ErrNotSupported)
	}
	defer o.of.open.Add(-1)
	if o.of.open.Add(1) <= 0 || o.closed.Load() { // nothing is unmapped from here on
		return driver.ErrClosed
	}
	var err error
	if sum := digest.CRC32C(o.bytes); sum != o.sum {
		err = fmt.Errorf("object has CRC-32C %08x, and %08x when it was put: %w", sum, o.sum,
			driver.ErrCorrupt)
	}
	if o.closed.Load() { // meanwhile: they may be another object's
		return driver.ErrClosed
	}
	return o.of.why(o.word, err)
}

// Close lets the object go. ErrRevoked says that the bytes may have changed while they were held;
// otherwise they have not. A second Close does nothing.
func (o *View) Close() error {
	if o.closed.Swap(true) {
		return nil
	}
	err := o.of.why(o.word, nil)
	o.of.letGo(o.word)
	o.of.open.Add(-1)
	return err
}

// Reader reads the objects of one Writer. Its methods may be called by any goroutine.
type Reader struct {
	member
	conn  *net.UnixConn
	by    proc.Remote // the writer's process
	note  []byte
	table []byte
	mine  []byte
	gone  chan struct{}
	ended sync.WaitGroup
}

// Join asks the writer at a path for a seat, again and again until ctx is over: the writer may
// still have to come. A fork of this process has no part in the ring.
func Join(ctx context.Context, path string) (*Reader, error) {
	var ended os.FileInfo // the socket of a writer that has ended
	var err error
	for {
		// A child of that has the socket still: the kernel keeps each connection there, and when it
		// has kept enough it refuses all, also who asks whether the next writer may have the path.
		at, _ := os.Stat(path) // where it fails join says why
		if ended == nil || at == nil || !os.SameFile(at, ended) ||
			!at.ModTime().Equal(ended.ModTime()) {
			var r *Reader
			r, err = join(ctx, path)
			if err == nil || errors.Is(err, driver.ErrVersion) || errors.Is(err, os.ErrPermission) {
				return r, err
			}
			if ended = nil; errors.Is(err, os.ErrProcessDone) {
				ended = at
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("join the ring at %s: %w (%w)", path, err, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func join(ctx context.Context, path string) (_ *Reader, err error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, err
	}
	conn := c.(*net.UnixConn)
	defer func() {
		if err != nil {
			_ = conn.Close() // the error that counts is there
		}
	}()
	writer, err := proc.Identify(conn) // whoever may write to the folder can listen there
	if err == nil && writer.Dead() {
		writer.Release()
		err = fmt.Errorf("process %d, the writer: %w", writer.PID, os.ErrProcessDone)
	}
	if err != nil {
		return nil, err
	}
	r := &Reader{conn: conn, by: writer, gone: make(chan struct{})}
	defer func() {
		if err != nil {
			writer.Release()
			r.ended.Wait()
		}
	}()
	testpoint.At("ring: identified")
	r.ended.Go(func() {
		if writer.Wait() == nil { // a child of the writer may have the connection open still
			_ = conn.SetReadDeadline(time.Unix(1, 0))
		}
	})
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	w, fds, err := receiveWelcome(conn)
	defer closeAll(fds)
	if err != nil {
		return nil, err
	}
	r.note = w.note
	defer func() {
		if err != nil {
			err = errors.Join(err, r.unmap())
		}
	}()
	r.table, err = hostmem.MapSealed(fds[0], tableBytes(w.objects), unix.PROT_READ)
	if err != nil {
		return nil, err
	}
	r.mine, err = hostmem.MapSealed(fds[1], wordsBytes(w.objects), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, err
	}
	if r.data, err = hostmem.MapSealedPool(fds[2], w.bytes); err != nil {
		return nil, err
	}
	// A child would go on reading when nobody keeps the bytes for it, and let go of what we hold.
	for _, mem := range [][]byte{r.table, r.mine, r.data} {
		if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
			return nil, fmt.Errorf("keep the ring from forks: %w",
				os.NewSyscallError("madvise", err))
		}
	}
	r.head, r.rows = asTable(r.table, w.objects)
	r.words = asWords(r.mine, w.objects)
	r.sums, r.seat, r.epoch = w.sums, int(w.seat), w.epoch
	r.member.ring = func() { _ = sendNow(conn, doorbell) } // if it is full, there is one to read
	if !stop() {
		return nil, ctx.Err()
	}
	if err := sendNow(conn, doorbell); err != nil { // we have come
		return nil, fmt.Errorf("tell the writer: %w", err)
	}
	r.ended.Go(r.watch)
	return r, nil
}

// watch returns when the connection has ended.
func (r *Reader) watch() {
	defer close(r.gone)
	var p [1]byte
	for {
		if n, err := r.conn.Read(p[:]); n == 0 || err != nil {
			return
		}
	}
}

// Get holds the object of a handle that the writer has given out since it was put. ErrMiss says
// that it has gone, or may be about to; ErrRevoked that this reader must join again. After the
// writer's end what there was can be got still. One crossing of memory and no call of the kernel.
func (r *Reader) Get(h Handle) (*View, error) {
	o, err := r.get(h)
	if err == ErrMiss {
		select {
		case <-r.gone:
			return nil, fmt.Errorf("the writer has ended: join its next one: %w", err)
		default:
		}
	}
	return o, err
}

// Note is the Config.Note of the writer.
func (r *Reader) Note() []byte { return r.note }

// Gone is closed when the writer has ended: what it puts from then on needs another Join.
func (r *Reader) Gone() <-chan struct{} { return r.gone }

// Close leaves the ring. While Views are open it is driver.ErrBusy, and nothing has changed.
func (r *Reader) Close() error {
	if err := r.member.close(); err != nil {
		return err
	}
	_ = r.conn.CloseWrite() // tells the writer, also where a child has the descriptor still
	err := r.conn.Close()
	r.by.Release()
	r.ended.Wait()
	return errors.Join(err, r.unmap())
}

func (r *Reader) unmap() (err error) {
	for _, mem := range [][]byte{r.table, r.mine} {
		if mem != nil {
			err = errors.Join(err, unix.Munmap(mem))
		}
	}
	if r.data != nil {
		err = errors.Join(err, hostmem.Unmap(r.data))
	}
	return err
}
