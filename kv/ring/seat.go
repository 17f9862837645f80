// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// seat is a reader as the writer knows it. Writer.mu guards it.
type seat struct {
	number  int
	epoch   uint64
	conn    *net.UnixConn
	process proc.Remote
	words   []word // nil: the seat is another's now
	mem     []byte
	left    bool          // its connection has ended: it gets nothing any more, and may hold
	stopped bool          // the process was when it was looked at last
	frozen  time.Duration // for which it has been seen so, each time
}

const (
	version      = 1
	welcomeBytes = 40 // without the note behind it
	noteMax      = 512
	endPoll      = 100 * time.Millisecond
	sweepPause   = 10 * time.Millisecond // between two looks at all readers' processes
	// stoppedMost is what two looks at a stopped process prove at most: it may have run between
	// them.
	stoppedMost = time.Second
)

// joinLimit is how long one reader may take for its welcome, and to say that it has mapped the
// ring; a test shortens it.
var joinLimit = 5 * time.Second

var doorbell = []byte{1}

// welcome is what a reader learns beside the descriptors of table, words and data.
type welcome struct {
	objects, bytes, epoch uint64
	seat                  uint32
	sums                  bool
	note                  []byte
}

func (w *welcome) encode() []byte {
	p := make([]byte, welcomeBytes, welcomeBytes+len(w.note))
	binary.LittleEndian.PutUint32(p, version)
	binary.LittleEndian.PutUint64(p[8:], w.objects)
	binary.LittleEndian.PutUint64(p[16:], w.bytes)
	binary.LittleEndian.PutUint64(p[24:], w.epoch)
	binary.LittleEndian.PutUint32(p[32:], w.seat)
	if w.sums {
		p[36] = 1
	}
	return append(p, w.note...)
}

// receiveWelcome reads what the writer says first, which is also a refusal in words. The
// descriptors are the caller's.
func receiveWelcome(conn *net.UnixConn) (w welcome, fds []int, err error) {
	p, oob := make([]byte, 1024), make([]byte, unix.CmsgSpace(3*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(p, oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return w, nil, fmt.Errorf("hear the writer: %w", err)
	}
	if messages, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for i := range messages {
			got, _ := unix.ParseUnixRights(&messages[i]) // another kind has none
			fds = append(fds, got...)
		}
	}
	p = p[:n]
	if n < 4 || binary.LittleEndian.Uint32(p) != version {
		return w, fds, fmt.Errorf("join: the writer is of another version, we are of %d: %w",
			version, driver.ErrVersion)
	}
	if n < welcomeBytes || len(fds) != 3 {
		return w, fds, fmt.Errorf("join: the writer has no seat for us: %s: %w", p[4:],
			driver.ErrBusy)
	}
	w.objects = binary.LittleEndian.Uint64(p[8:])
	w.bytes = binary.LittleEndian.Uint64(p[16:])
	w.epoch = binary.LittleEndian.Uint64(p[24:])
	w.seat = binary.LittleEndian.Uint32(p[32:])
	w.sums, w.note = p[36] == 1, p[welcomeBytes:]
	if w.objects > objectsMax || w.seat >= seatsMax || w.bytes > 1<<46 {
		return w, fds, fmt.Errorf("join: the writer's welcome says %+v: %w", w, driver.ErrCorrupt)
	}
	return w, fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // received and mapped, or not used: nothing can be lost
	}
}

// sendNow sends a message if the kernel has room for it.
func sendNow(conn *net.UnixConn, p []byte) (err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	ctrlErr := raw.Control(func(fd uintptr) {
		err = unix.Send(int(fd), p, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	return errors.Join(ctrlErr, err)
}

// speaks reports whether a message is there to be read: a Read past its deadline does not look, and
// the writer itself may have been stopped for as long.
func speaks(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	var p [1]byte
	n := 0
	ctrlErr := raw.Control(func(fd uintptr) {
		n, _, err = unix.Recvfrom(int(fd), p[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	})
	return ctrlErr == nil && err == nil && n > 0
}

// accept takes readers until the writer closes.
func (w *Writer) accept() {
	for {
		c, err := w.listener.Accept()
		if err != nil {
			if w.closing.Err() != nil {
				return
			}
			wait(w.closing, nil, endPoll) // a lack of descriptors, say, may pass
			continue
		}
		conn := c.(*net.UnixConn)
		if !w.keep(conn) {
			_ = conn.Close() // the reader tries again
			continue
		}
		w.working.Go(func() {
			defer w.forget(conn)
			w.serve(conn)
		})
	}
}

// keep counts the connections: strangers that say nothing get no more of them than readers.
func (w *Writer) keep(conn *net.UnixConn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closing.Err() != nil || len(w.conns) >= 2*len(w.seats) {
		return false
	}
	w.conns[conn] = true
	return true
}

func (w *Writer) forget(conn *net.UnixConn) {
	_ = conn.Close() // nothing is to be sent any more
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, conn)
}

// serve is the life of a reader, as the writer sees it: it sits down, rings when it lets go of an
// object that somebody waits for, hangs up, and has its seat until it holds nothing or has ended.
func (w *Writer) serve(conn *net.UnixConn) {
	process, err := proc.Identify(conn)
	if err != nil {
		refuse(conn, err)
		return
	}
	defer process.Release()
	s, err := w.sitDown(conn, process)
	if err != nil {
		refuse(conn, err)
		return
	}
	var p [16]byte
	testpoint.At("ring: seated")
	_ = conn.SetReadDeadline(time.Now().Add(joinLimit)) // fails behind a close, as Read does
	for {
		n, err := conn.Read(p[:])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if !speaks(conn) {
				w.dismiss(s)
				return
			}
			_ = conn.SetReadDeadline(time.Time{})
			continue
		}
		if n == 0 || err != nil {
			break
		}
		_ = conn.SetReadDeadline(time.Time{})
		w.came(s)
	}
	for !w.leave(s) {
		wait(w.closing, nil, endPoll)
	}
}

func refuse(conn *net.UnixConn, err error) {
	p := binary.LittleEndian.AppendUint32(nil, version)
	text := err.Error()
	_ = sendNow(conn, append(p, text[:min(len(text), 512)]...)) // it may have gone
}

// sitDown gives a reader a seat and a page of words, and tells it.
func (w *Writer) sitDown(conn *net.UnixConn, process proc.Remote) (s *seat, err error) {
	objects := uint64(len(w.rows))
	fd, mem, err := hostmem.NewSealed("sluice-ring-words", wordsBytes(objects), false)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }() // the mapping and the reader keep it
	w.mu.Lock()
	w.sweep(time.Now())
	n := slices.Index(w.seats, nil)
	if n < 0 {
		w.mu.Unlock()
		return nil, errors.Join(unix.Munmap(mem), fmt.Errorf("all %d seats are taken: raise "+
			"Config.Readers: %w", len(w.seats), driver.ErrBusy))
	}
	w.epoch++
	s = &seat{number: n, epoch: w.epoch, conn: conn, process: process, words: asWords(mem, objects),
		mem: mem}
	w.seats[n] = s
	if w.awaited&(1<<n) == 0 { // one that was awaited is to get what was put before
		w.forgetDebts(n)
	}
	w.head.seats[n].Store(s.epoch)
	w.mu.Unlock()
	hello := welcome{objects, uint64(len(w.data)), s.epoch, uint32(n), w.cfg.Sums, w.cfg.Note}
	err = conn.SetWriteDeadline(time.Now().Add(joinLimit))
	if err == nil {
		_, _, err = conn.WriteMsgUnix(hello.encode(), unix.UnixRights(w.tableFD, fd, w.dataFD), nil)
	}
	if err != nil {
		w.leave(s)
		return nil, fmt.Errorf("welcome a reader: %w", err)
	}
	return s, nil
}

// came is called for each word of a reader. The first one says that it has mapped the ring: a
// program that connects and goes again, as one that looks whether there is a writer, is no reader
// that was awaited.
func (w *Writer) came(s *seat) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.words != nil {
		w.awaited &^= 1 << s.number
	}
	w.wake()
}

// dismiss ends the seat of who has said nothing: no reader, whatever it writes into its words.
func (w *Writer) dismiss(s *seat) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.words != nil {
		w.head.seats[s.number].Store(0)
		w.clear(s)
	}
}

// leave has the writer wait no longer for what a reader was to get. It reports whether the seat is
// free: whoever hung up may live, and hold; its end is the proof, or that it holds nothing.
func (w *Writer) leave(s *seat) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	s.left = true
	if s.words != nil && w.closing.Err() == nil && !s.process.Dead() {
		if s.holds() {
			return false
		}
		// It may live, and get an object now: it raises its word before it looks at its seat.
		w.head.seats[s.number].Swap(0)
		if s.holds() {
			w.head.seats[s.number].Store(s.epoch)
			return false
		}
	}
	w.clear(s)
	return true
}

func (s *seat) holds() bool {
	for i := range s.words {
		if s.words[i].holds.Load() != 0 {
			return true
		}
	}
	return false
}

// clear ends what a reader holds and waits for. The caller holds mu.
func (w *Writer) clear(s *seat) {
	if s.words == nil {
		return
	}
	w.seats[s.number], s.words = nil, nil
	_ = unix.Munmap(s.mem) // a whole mapping of ours: cannot fail
	w.wake()
}

// sweep gives up the seats of readers that have ended, or have been stopped for Config.Frozen, at
// each look. The caller holds mu.
func (w *Writer) sweep(now time.Time) {
	since := now.Sub(w.swept)
	if since < sweepPause {
		return
	}
	w.swept = now
	for _, s := range w.seats {
		switch {
		case s == nil:
			continue
		case s.process.Dead():
		case w.cfg.Frozen < 0 || !s.process.Stopped():
			s.stopped, s.frozen = false, 0
			continue
		case !s.stopped:
			s.stopped = true
			continue
		case s.frozen+min(since, stoppedMost) < w.cfg.Frozen:
			s.frozen += min(since, stoppedMost)
			continue
		default: // first the word that the reader looks at behind each use, then what it held
			w.head.seats[s.number].Store(0)
			w.stats.Revoked++
		}
		w.clear(s)
		_ = s.conn.Close() // a child may have it open still
	}
}

// tell wakes all that wait for room.
func (w *Writer) tell() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wake()
}

// wake is tell for who holds mu.
func (w *Writer) wake() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// wait sleeps until something has changed, at most for a while, or until ctx is over.
func wait(ctx context.Context, changed <-chan struct{}, most time.Duration) {
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-changed:
	case <-t.C:
	case <-ctx.Done():
	}
}
