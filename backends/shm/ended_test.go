// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// soon waits for an event of another goroutine or process.
func soon(t *testing.T, what string, came func() bool) {
	t.Helper()
	require.Eventually(t, came, 20*time.Second, time.Millisecond, what)
}

// A connection that ends with a reset, because an answer was not read, is forgotten as any
// other: what the reset loses is not where the peer says that it has left.
func TestResetConnectionsAreForgotten(t *testing.T) {
	b := open(t, Config{})
	for range 20 {
		fd, page, err := hostmem.NewSealed("test", connectionBytes(ringBytesMin), false)
		require.NoError(t, err)
		word(page, pageRingAt).Store(ringBytesMin)
		word(page, pageMagicAt).Store(pageMagic)
		conn := rawDial(t, b)
		require.NoError(t, send(conn, limit, hello(b, ringBytesMin), []int{fd, b.event}))
		closeAll([]int{fd})
		soon(t, "the connection is accepted", func() bool { return len(*b.inbound.Load()) == 1 })
		word(page, pageLeftAt).Store(1)
		require.NoError(t, conn.Close()) // the welcome is not read: the owner gets a reset
		msgs := receive(t, b, 1)
		require.ErrorIs(t, msgs[0].Err, driver.ErrPeerLost)
		var none [1]driver.Message
		_, _ = b.Receive(none[:])
		require.Empty(t, *b.inbound.Load(), "the connection is kept")
		require.NoError(t, unix.Munmap(page))
	}
}

// Peers that close while an Import is answered leave nothing behind, on either side.
func TestCloseBesideAnswersLeavesNothing(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	far, _ := share(t, owner, drivertest.HostMemory, 1<<20)
	token, _ := far.AppendToken(nil)
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(list)
	}
	before, lost := open(), 0
	var msgs [64]driver.Message
	const rounds = 300
	for i := range rounds {
		p := dial(t, b, owner.Addr())
		var wg sync.WaitGroup
		wg.Go(func() { _, _, _ = p.Import(token) })
		wg.Go(func() {
			for range i % 50 {
				_ = p.lost.Load()
			}
			_ = p.Close()
		})
		wg.Wait()
		n, err := owner.Receive(msgs[:])
		require.NoError(t, err)
		lost += n
	}
	soon(t, "all connections end and are forgotten", func() bool {
		n, _ := owner.Receive(msgs[:])
		lost += n
		return len(*owner.inbound.Load()) == 0
	})
	require.Equal(t, rounds, lost)
	soon(t, "all descriptors are closed", func() bool { return open() <= before })
}

// firstPart is the first of two parts of an answer, with a descriptor.
func firstPart(t *testing.T, id uint32) (body []byte, fds []int) {
	t.Helper()
	fd, mem, err := hostmem.NewSealed("test", pageBytes, false)
	require.NoError(t, err)
	require.NoError(t, unix.Munmap(mem))
	body = answerHead(id, statusOK)[1:]
	body = binary.LittleEndian.AppendUint64(body, 7)           // generation
	body = binary.LittleEndian.AppendUint64(body, 2*pageBytes) // size
	body = binary.LittleEndian.AppendUint32(body, 2)           // extents
	body = binary.LittleEndian.AppendUint32(body, 1)           // of those, here
	for _, v := range []uint64{0, pageBytes, 0} {
		body = binary.LittleEndian.AppendUint64(body, v)
	}
	return binary.LittleEndian.AppendUint32(body, 0), []int{fd}
}

// An answer of several parts whose question ends before one of them, behind it, or while it is
// taken, closes each descriptor once.
func TestQuestionThatEndsBetweenTwoParts(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	far, _ := share(t, owner, drivertest.HostMemory, 2*pageBytes)
	p := dial(t, b, owner.Addr())
	_ = importOf(t, p, far)
	m := (*p.imports.Load())[0].Load()
	for _, when := range []string{"before", "behind", "while"} {
		p.mu.Lock()
		done := make(chan error, 1)
		f := &fetch{m: m, done: done, deadline: math.MaxInt64,
			timer: time.NewTimer(time.Hour)}
		p.fetches[1000] = f
		p.mu.Unlock()
		body, fds := firstPart(t, 1000)
		switch when {
		case "before":
			p.failFetches(driver.ErrPeerLost)
			require.NoError(t, p.answered(body, fds))
		case "behind":
			require.NoError(t, p.answered(body, fds))
			require.Empty(t, done)
			p.failFetches(driver.ErrPeerLost)
		case "while": // the questions have failed, and this one was not among them
			p.lost.Store(true)
			require.NoError(t, p.answered(body, fds))
		}
		require.Len(t, done, 1, when)
		require.ErrorIs(t, <-done, driver.ErrPeerLost)
		_, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0)
		require.ErrorIs(t, err, unix.EBADF)
	}
}

// serveInherited is an owner, and a peer of the backend whose address it reads. A child of
// it has inherited both sockets.
func serveInherited() int {
	b, err := New(Config{})
	if err != nil {
		return fail(err)
	}
	fmt.Printf("%x -\n", b.Addr())
	var line string
	if _, err := fmt.Scanln(&line); err != nil {
		return fail(err)
	}
	addr, _ := hex.DecodeString(line)
	p, err := b.Connect(context.Background(), addr)
	if err != nil {
		return fail(err)
	}
	for len(*b.inbound.Load()) == 0 {
		time.Sleep(time.Millisecond)
	}
	child := exec.Command("sleep", "600")
	for _, c := range []interface{ File() (*os.File, error) }{p.(*peer).sock,
		(*b.inbound.Load())[0].sock} {
		f, err := c.File()
		if err != nil {
			return fail(err)
		}
		child.ExtraFiles = append(child.ExtraFiles, f)
	}
	if err := child.Start(); err != nil {
		return fail(err)
	}
	fmt.Println(child.Process.Pid)
	select {} // until it is killed
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// The end of a process ends its connections, although a child of it still has the sockets.
func TestEndOfAProcessWhoseSocketsAChildHas(t *testing.T) {
	b := open(t, Config{})
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), ownerVariable+"=inherited", "GORACE="+os.Getenv("GORACE")+
		" atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	pipe, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	out := bufio.NewReader(pipe)
	line, err := out.ReadString('\n')
	require.NoError(t, err)
	addr, _ := hex.DecodeString(strings.Fields(line)[0])
	p := dial(t, b, addr)
	fmt.Fprintf(in, "%x\n", b.Addr())
	line, err = out.ReadString('\n')
	require.NoError(t, err)
	var child int
	_, err = fmt.Sscan(line, &child)
	require.NoError(t, err)
	defer func() { _ = unix.Kill(child, unix.SIGKILL) }()

	require.NoError(t, cmd.Process.Kill())
	select {
	case <-p.Lost():
	case <-time.After(20 * time.Second):
		t.Fatal("the owner has ended, and its peer is not lost")
	}
	msgs := receive(t, b, 1)
	require.ErrorIs(t, msgs[0].Err, driver.ErrPeerLost)
}
