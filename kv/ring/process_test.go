// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Children are readers or a writer in a process of their own. They take a line for each step, and
// answer with one.
const (
	pathVariable  = "SLUICE_TEST_RING"
	partVariable  = "SLUICE_TEST_PART"
	pointVariable = "SLUICE_TEST_POINT"
)

func TestMain(m *testing.M) {
	path, ok := os.LookupEnv(pathVariable)
	if !ok {
		os.Exit(m.Run())
	}
	part := readPart
	if os.Getenv(partVariable) == "write" {
		part = writePart
	}
	if err := part(path); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type child struct {
	*exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startChild(t *testing.T, path, part, point string) *child {
	t.Helper()
	c := &child{Cmd: exec.Command(os.Args[0])}
	c.Env = append(os.Environ(), pathVariable+"="+path, partVariable+"="+part,
		pointVariable+"="+point)
	c.Stderr = os.Stderr
	var err error
	c.in, err = c.StdinPipe()
	require.NoError(t, err)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	c.out = bufio.NewScanner(out)
	require.NoError(t, c.Start())
	t.Cleanup(func() { _, _ = c.Process.Kill(), c.Wait() }) // it may have ended
	require.Equal(t, "ready", c.answer(t))
	return c
}

func (c *child) answer(t *testing.T) string {
	t.Helper()
	require.True(t, c.out.Scan(), "the child has ended: %v", c.out.Err())
	return c.out.Text()
}

func (c *child) tell(t *testing.T, format string, args ...any) {
	t.Helper()
	_, err := fmt.Fprintf(c.in, format+"\n", args...)
	require.NoError(t, err)
}

func (c *child) ask(t *testing.T, format string, args ...any) string {
	t.Helper()
	c.tell(t, format, args...)
	return c.answer(t)
}

// awaitStop returns once the child stands still by its own SIGSTOP; goOn ends that.
func (c *child) awaitStop(t *testing.T) {
	var status unix.WaitStatus
	_, err := unix.Wait4(c.Process.Pid, &status, unix.WUNTRACED, nil)
	require.NoError(t, err)
	require.True(t, status.Stopped())
}

func (c *child) goOn(t *testing.T) { require.NoError(t, c.Process.Signal(unix.SIGCONT)) }

// readPart is a reader: "get ROW GENERATION" holds, "sum" verifies, "end" lets go of what it holds,
// and "stop" stops the process.
func readPart(path string) error {
	r, err := Join(context.Background(), path)
	if err != nil {
		return err
	}
	testpoint.First(os.Getenv(pointVariable), testpoint.StopProcess)
	fmt.Println("ready")
	var held *View
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var h Handle
		err = nil
		switch text := in.Text(); {
		case text == "stop":
			testpoint.StopProcess()
		case text == "end":
			err = held.Close()
		case text == "sum":
			err = held.Verify()
		default:
			if _, err = fmt.Sscanf(text, "get %d %d", &h.Row, &h.Generation); err == nil {
				held, err = r.Get(h)
			}
		}
		switch {
		case errors.Is(err, ErrMiss):
			fmt.Println("miss")
		case errors.Is(err, ErrRevoked):
			fmt.Println("revoked")
		case err != nil:
			return err
		default:
			fmt.Println("done")
		}
	}
	return nil
}

// writePart is a writer of one object of a page: "put KEY".
func writePart(path string) error {
	w, err := Open(Config{Path: path, Bytes: 4096})
	if err != nil {
		return err
	}
	testpoint.First(os.Getenv(pointVariable), testpoint.StopProcess)
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		key, _ := strings.CutPrefix(in.Text(), "put ")
		h, err := w.Put(context.Background(), key, filled(4096, key[0]))
		if err != nil {
			return err
		}
		fmt.Println(h.Row, h.Generation)
	}
	return nil
}

// A reader that is killed holds nothing, waits for nothing, and has no seat, also where a child of
// it has its connection still.
func TestKilledReader(t *testing.T) {
	for _, kept := range []bool{false, true} {
		t.Run(fmt.Sprint(kept), func(t *testing.T) {
			w := openRing(t, Config{Bytes: 2 * 4096, Patience: time.Hour, Readers: 1})
			c := startChild(t, w.cfg.Path, "read", "")
			h := put(t, w, "a", 4096, 1)
			put(t, w, "b", 4096, 2) // owed
			require.Equal(t, "done", c.ask(t, "get %d %d", h.Row, h.Generation))
			_, err := w.Put(over, "c", make([]byte, 4096))
			require.ErrorIs(t, err, ErrFull)
			require.ErrorContains(t, err, fmt.Sprintf("process %d", c.Process.Pid))
			if kept {
				c.keepDescriptors(t)
			}
			require.NoError(t, c.Process.Kill())
			_, err = w.Put(t.Context(), "c", make([]byte, 4096))
			require.NoError(t, err)
			put(t, w, "d", 4096, 4)
			joinRing(t, w)
		})
	}
}

// keepDescriptors has this process hold all that a child has open, as a child of that would.
func (c *child) keepDescriptors(t *testing.T) {
	pidfd, err := unix.PidfdOpen(c.Process.Pid, 0)
	require.NoError(t, err)
	defer unix.Close(pidfd)
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.Process.Pid))
	require.NoError(t, err)
	for _, entry := range fds {
		n, err := strconv.Atoi(entry.Name())
		require.NoError(t, err)
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if err == nil { // one that was closed meanwhile is not there
			t.Cleanup(func() { _ = unix.Close(fd) })
		}
	}
}

// Who connects and says nothing has a seat for a while.
func TestSilentStranger(t *testing.T) {
	defer func(was time.Duration) { joinLimit = was }(joinLimit)
	joinLimit = time.Second
	w, err := Open(Config{Path: filepath.Join(t.TempDir(), "ring"), Bytes: 4096, Readers: 1})
	require.NoError(t, err)
	defer w.Close()
	conn, err := net.Dial("unixpacket", w.cfg.Path)
	require.NoError(t, err)
	defer conn.Close()
	_, fds, err := receiveWelcome(conn.(*net.UnixConn))
	defer closeAll(fds)
	require.NoError(t, err)
	r := joinRing(t, w)
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, r.Close())
}

// A reader that has said that it is there keeps its seat, though the writer hears it past the time.
func TestWriterHearsLate(t *testing.T) {
	defer func(was time.Duration) { joinLimit = was }(joinLimit)
	w := openRing(t, Config{Bytes: 4096, Await: 1})
	stand := testpoint.Stand(t, "ring: seated")[0]
	h := put(t, w, "a", 4096, 1)
	r := joinRing(t, w)
	<-stand.Came
	joinLimit = -time.Second
	stand.GoOn()
	require.Eventually(t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.awaited == 0 || w.seats[0] == nil
	}, time.Minute, time.Millisecond)
	o, err := r.Get(h)
	require.NoError(t, err)
	require.NoError(t, o.Close())
}

// TestWriterOfAnotherUser: whoever may make a socket at the path gets no reader.
func TestWriterOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "ring",
			Reason: "it takes root to be another user"})
	}
	name := fmt.Sprintf("@sluice-ring-test-%d", os.Getpid())
	listening := make(chan net.Listener)
	go func() {
		defer close(listening)
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		const nobody = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			return
		}
		if l, err := net.Listen("unixpacket", name); err == nil {
			listening <- l
		}
	}()
	l := <-listening
	require.NotNil(t, l)
	defer l.Close()
	_, err := Join(t.Context(), name)
	require.ErrorIs(t, err, os.ErrPermission)
}

// A reader that is stopped at any step keeps what it holds for Frozen. Then others get its room,
// and it is told when it goes on; never are other bytes taken for those of the handle.
func TestStoppedReader(t *testing.T) {
	for _, point := range []string{"", "ring: raised"} {
		t.Run(point, func(t *testing.T) {
			w := openRing(t, Config{Bytes: 4096, Sums: true, Frozen: time.Millisecond})
			c := startChild(t, w.cfg.Path, "read", point)
			h := put(t, w, "a", 4096, 1)
			c.tell(t, "get %d %d", h.Row, h.Generation)
			if point == "" {
				require.Equal(t, "done", c.answer(t))
				_, err := w.Put(over, "b", make([]byte, 4096))
				require.ErrorIs(t, err, ErrFull)
				c.tell(t, "stop")
			}
			c.awaitStop(t)
			_, err := w.Put(t.Context(), "b", make([]byte, 4096))
			require.NoError(t, err)
			require.EqualValues(t, 1, w.Stats().Revoked)
			require.Zero(t, w.Stats().Readers)
			c.goOn(t)
			if point == "" {
				require.Equal(t, "done", c.answer(t))
				require.Equal(t, "revoked", c.ask(t, "sum"))
				require.Equal(t, "revoked", c.ask(t, "end"))
			} else {
				require.Equal(t, "revoked", c.answer(t))
			}
			h, _ = w.Find("b")
			require.Equal(t, "revoked", c.ask(t, "get %d %d", h.Row, h.Generation))
			r := joinRing(t, w)
			require.Equal(t, make([]byte, 4096), got(t, r, h))
		})
	}
}

// Two looks at a reader that was stopped at both do not say that it was stopped between them.
func TestStoppedTwice(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096, Frozen: 2 * stoppedMost})
	c := startChild(t, w.cfg.Path, "read", "")
	c.tell(t, "stop")
	c.awaitStop(t)
	look := func(after time.Duration) uint64 {
		w.mu.Lock()
		w.sweep(w.swept.Add(after))
		w.mu.Unlock()
		return w.Stats().Revoked
	}
	require.Zero(t, look(time.Hour))
	require.Zero(t, look(time.Hour))
	require.EqualValues(t, 1, look(stoppedMost))
	c.goOn(t)
}

// A reader is told of the end of a writer whose sockets another process has still, as a child of
// the writer. Nobody joins there, and another writer takes the path.
func TestKilledWriterWithChild(t *testing.T) {
	for _, reaped := range []bool{false, true} {
		t.Run(fmt.Sprint(reaped), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "ring")
			c := startChild(t, path, "write", "")
			r, err := Join(t.Context(), path)
			require.NoError(t, err)
			defer r.Close()
			c.keepDescriptors(t)
			require.NoError(t, c.Process.Signal(unix.SIGSTOP))
			c.awaitStop(t)
			stand := testpoint.Stand(t, "ring: identified")[0]
			waits := make(chan error)
			go func() {
				_, err := join(t.Context(), path)
				waits <- err
			}()
			<-stand.Came
			stand.GoOn()
			require.NoError(t, c.Process.Kill())
			<-r.Gone()
			require.Error(t, <-waits)
			if reaped {
				_ = c.Wait()
			}
			before := pending(t, path)
			soon, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err = Join(soon, path)
			cancel()
			require.ErrorIs(t, err, os.ErrProcessDone)
			require.LessOrEqual(t, pending(t, path), before+1, "they fill what the kernel keeps")
			joinRing(t, openRing(t, Config{Path: path, Bytes: 4096}))
		})
	}
}

// pending is how many connections the kernel keeps for who listens at a path, or has accepted.
func pending(t *testing.T, path string) int {
	all, err := os.ReadFile("/proc/net/unix")
	require.NoError(t, err)
	return bytes.Count(all, []byte(path+"\n"))
}

func TestStoppedReaderKeeps(t *testing.T) {
	w := openRing(t, Config{Bytes: 4096, Frozen: -1})
	c := startChild(t, w.cfg.Path, "read", "")
	h := put(t, w, "a", 4096, 1)
	require.Equal(t, "done", c.ask(t, "get %d %d", h.Row, h.Generation))
	c.tell(t, "stop")
	c.awaitStop(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := w.Put(ctx, "b", make([]byte, 4096))
	require.ErrorIs(t, err, ErrFull)
	c.goOn(t)
	require.Equal(t, "done", c.answer(t))
	require.Equal(t, "done", c.ask(t, "end"))
}

// A writer that is stopped, and then killed, at any step holds no reader up. What it had committed
// stays, and the next writer's handles are others.
func TestKilledWriter(t *testing.T) {
	for _, point := range []string{"ring: written", "ring: taken away"} {
		t.Run(point, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "ring")
			c := startChild(t, path, "write", point)
			r, err := Join(t.Context(), path)
			require.NoError(t, err)
			defer r.Close()
			var h Handle
			if point == "ring: taken away" {
				_, err = fmt.Sscan(c.ask(t, "put a"), &h.Row, &h.Generation)
				require.NoError(t, err)
				require.Equal(t, filled(4096, 'a'), got(t, r, h))
				c.tell(t, "put b")
			} else {
				c.tell(t, "put a")
			}
			c.awaitStop(t)
			_, err = r.Get(h)
			require.ErrorIs(t, err, ErrMiss)
			require.NoError(t, c.Process.Kill())
			<-r.Gone()
			for row := range r.rows {
				require.Zero(t, r.rows[row].generation.Load())
			}
			w := openRing(t, Config{Path: path, Bytes: 4096})
			next := joinRing(t, w)
			h2 := put(t, w, "a", 4096, 3)
			require.Equal(t, filled(4096, 3), got(t, next, h2))
			_, err = r.Get(h2)
			require.ErrorIs(t, err, ErrMiss)
		})
	}
}

// Readers come, get, hold and go at random beside a writer whose ring is too small: each object has
// the bytes of its key, for as long as it is held.
func TestRandom(t *testing.T) {
	w := openRing(t, Config{Bytes: 64 << 10, Objects: 32, Patience: time.Millisecond, Sums: true})
	fill := func(key uint64) []byte {
		p := make([]byte, 8+key%9000)
		for i := range p {
			p[i] = byte(key + uint64(i)*7)
		}
		binary.LittleEndian.PutUint64(p, key)
		return p
	}
	handles := make(chan struct {
		Handle
		key uint64
	}, 16)
	var readers sync.WaitGroup
	for n := range 4 {
		readers.Go(func() {
			r, err := Join(t.Context(), w.cfg.Path)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = r.Close() }() // its views are closed
			random := rand.New(rand.NewPCG(1, uint64(n)))
			var held []*View
			var keys []uint64
			for h := range handles {
				o, err := r.Get(h.Handle)
				if err == nil {
					held, keys = append(held, o), append(keys, h.key)
				} else if !errors.Is(err, ErrMiss) {
					t.Error(err)
				}
				for len(held) > random.IntN(4) {
					if string(held[0].Bytes()) != string(fill(keys[0])) || held[0].Verify() != nil {
						t.Errorf("key %d has other bytes", keys[0])
					}
					if err := held[0].Close(); err != nil {
						t.Error(err)
					}
					held, keys = held[1:], keys[1:]
				}
			}
			for _, o := range held {
				_ = o.Close()
			}
		})
	}
	random := rand.New(rand.NewPCG(2, 2))
	for range 5000 {
		key := random.Uint64N(100)
		name := fmt.Sprint(key)
		h, known := w.Handle(name)
		if !known {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			var err error
			h, err = w.Put(ctx, name, fill(key))
			cancel()
			require.NoError(t, err)
		}
		handles <- struct {
			Handle
			key uint64
		}{h, key}
		if random.IntN(50) == 0 {
			w.Remove(name)
		}
	}
	close(handles)
	readers.Wait()
	w.Clear()
	stats := w.Stats()
	require.Zero(t, stats.Objects)
	require.Equal(t, stats.Bytes, stats.Free)
}
