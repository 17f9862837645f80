// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func rawDial(t *testing.T, b *Backend) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: b.address.socket(),
		Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// hello is a greeting of a peer with these descriptors and this ring.
func hello(b *Backend, ring uint64) []byte {
	return append(binary.LittleEndian.AppendUint64([]byte{msgHello, version}, ring), b.addr...)
}

// Other programs send anything, or nothing: they are hung up on, and a peer is
// served all the same.
func TestGarbageInsteadOfAHelloIsHungUpOn(t *testing.T) {
	b := open(t, Config{DialTimeout: 2 * time.Second})
	page, _, err := hostmem.NewSealed("test", connectionBytes(ringBytesMin), false)
	require.NoError(t, err)
	small, _, err := hostmem.NewSealed("test", pageBytes, false)
	require.NoError(t, err)
	soft, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING) // right size, may shrink
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(soft, int64(connectionBytes(ringBytesMin))))
	blocking, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	require.NoError(t, err)
	defer closeAll([]int{page, small, soft, blocking})
	good := hello(b, ringBytesMin)
	cases := []struct {
		name string
		msg  []byte
		fds  []int
	}{
		{"nothing", nil, nil},
		{"one byte", []byte{0}, nil},
		{"another kind", []byte{msgFetch, 1, 2, 3}, nil},
		{"no descriptors", good, nil},
		{"one descriptor", good, []int{page}},
		{"many descriptors", good, []int{page, page, page, page, page}},
		{"event is a memfd", good, []int{page, page}},
		{"event that blocks", good, []int{page, blocking}},
		{"page too short", good, []int{small, b.event}},
		{"page can shrink", good, []int{soft, b.event}},
		{"page without magic", good, []int{page, b.event}},
		{"wild ring", hello(b, 1<<60), []int{page, b.event}},
		{"another version", append([]byte{msgHello, version + 1}, good[2:]...),
			[]int{page, b.event}},
		{"no address", good[:10], []int{page, b.event}},
	}
	for _, c := range cases {
		conn := rawDial(t, b)
		if c.msg != nil {
			err := send(conn, limit, c.msg, c.fds)
			if err != nil && !errors.Is(err, unix.EPIPE) { // hung up on before we came to it
				t.Fatal(err)
			}
		}
		expectHangUp(t, c.name, conn)
	}
	p := dial(t, b, b.Addr())
	require.NoError(t, p.Close())
}

// expectHangUp reads until the end; a refusal may come first.
func expectHangUp(t *testing.T, name string, conn *net.UnixConn) {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(limit))
	var buf [64]byte
	for {
		n, err := conn.Read(buf[:])
		var late net.Error
		if errors.As(err, &late) && late.Timeout() {
			t.Errorf("%s: still connected", name)
			return
		}
		if err != nil || n == 0 {
			return
		}
		if n < 3 || buf[0] != msgWelcome || buf[2] == byte(session.StatusOK) {
			t.Errorf("%s: answered %v, want a refusal", name, buf[:n])
			return
		}
	}
}

// TestManySilentConnectionsKeepNoPeerOut though each may keep its place for an hour otherwise.
func TestManySilentConnectionsKeepNoPeerOut(t *testing.T) {
	b := open(t, Config{DialTimeout: time.Hour})
	for range 2 * handshakesMax {
		rawDial(t, b)
	}
	other := open(t, Config{})
	_ = dial(t, other, b.Addr()).Close()
}

// A peer writes anything into the ring: its connection ends, with the word that
// it is lost, and nothing else happens.
func TestGarbageInTheRingEndsTheConnection(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	b := open(t, Config{})
	words := []uint64{entryWord(entryData, messageMax+1), entryWord(entryData, 1<<56-1),
		entryWord(9, 8),
		entryWord(entryPad, 0), entryWord(entryPad, 1), entryWord(entrySkip, 1<<40), ^uint64(0)}
	for range 40 {
		words = append(words, rng.Uint64()|1<<63)
	}
	for _, w := range words {
		p := dial(t, b, b.Addr())
		require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: []byte("fine")}))
		require.NoError(t, await(t, b, 1))
		word(p.out.mem, p.out.tail).Store(w)
		msgs := receive(t, b, 2)
		if string(msgs[0].Data) != "fine" || !errors.Is(msgs[1].Err, driver.ErrPeerLost) {
			t.Fatalf("word %#x: received %v, want the message and a lost peer", w, msgs)
		}
		require.NoError(t, p.Close())
	}
}

func receive(t *testing.T, b *Backend, want int) []driver.Message {
	t.Helper()
	var got []driver.Message
	var buf [8]driver.Message
	for end := time.Now().Add(limit); len(got) < want &&
		time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
		n, err := b.Receive(buf[:])
		require.NoError(t, err)
		got = append(got, buf[:n]...)
	}
	require.Len(t, got, want)
	return got
}

// A wild head makes the ring look full to the sender, never larger.
func TestGarbageInTheHeadIsAFullRing(t *testing.T) {
	b := open(t, Config{})
	p := dial(t, b, b.Addr())
	for _, head := range []uint64{1, 1 << 40, 1 << 63} {
		p.out.head.Store(head)
		err := p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: make([]byte, messageMax)})
		wantError(t, "notify over a wild head", err, driver.ErrFull)
	}
}

func TestOtherUsersAreRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("not root: the refusal of another user is not exercised")
		return
	}
	o := startOwner(t, "shared", 65534)
	b := open(t, Config{})
	_, err := b.Connect(context.Background(), o.addr)
	wantError(t, "connect to another user's backend", err, os.ErrPermission)
	a, err := decodeAddress(o.addr)
	require.NoError(t, err)
	a.uid = 0 // an address that lies: the kernel does not
	_, err = b.Connect(context.Background(), a.encode())
	wantError(t, "connect to another user's backend by a forged address", err, os.ErrPermission)
}

// soon waits for an event of another goroutine or process.
func soon(t *testing.T, what string, came func() bool) {
	t.Helper()
	require.Eventually(t, came, 20*time.Second, time.Millisecond, what)
}

// descriptors counts those of this process.
func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(list)
}

// awaitUnread waits for a message of the other side, and leaves it where it is.
func awaitUnread(t *testing.T, conn *net.UnixConn) {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(limit)))
	require.NoError(t, raw.Read(func(fd uintptr) bool {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK)
		return err == nil && n > 0
	}))
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
		awaitUnread(t, conn)
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
	before, lost := descriptors(t), 0
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
	soon(t, "all descriptors are closed", func() bool { return descriptors(t) <= before })
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
	cmd, in, out := startSelf(t, "inherited", 0)
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

// TestFilledAnnouncements has an owner write into the lines by which its peer announces copies: the
// peer is lost, and no call of it hangs.
func TestFilledAnnouncements(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, far := shared(t, owner, 4096, 1)
	_, near := shared(t, b, 4096, 2)
	p := dial(t, b, owner.Addr())
	key := importOf(t, p, far)
	for i := range announceMax {
		word(p.page, announceAt+uint64(i)*lineBytes).Store(1)
	}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: 4096,
		LocalKey: near.Key(), RemoteKey: key}}}))
	require.ErrorIs(t, await(t, b, 1), driver.ErrPeerLost)
	<-p.Lost()
	require.NoError(t, p.Close())
}

// TestAPeerThatBlocksItsEvent: a peer shows an event that does not block, then makes it one that
// does, and fills it. The owner takes messages, answers and revokes all the same.
func TestAPeerThatBlocksItsEvent(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{RingBytes: ringBytesMin})
	far, _ := share(t, owner, drivertest.HostMemory, 4096)
	p := dial(t, b, owner.Addr())
	_, err := b.Arm() // an answer is to wake it
	require.NoError(t, err)
	for err == nil { // until the ring is full: the owner is to tell when there is room
		err = p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: make([]byte, 20<<10)})
	}
	require.ErrorIs(t, err, driver.ErrFull)
	b.armed.Store(false) // its own goroutines write nothing
	for what, call := range map[string]func() error{
		"Receive": func() error {
			n, err := owner.Receive(make([]driver.Message, 4))
			if err == nil && n == 0 {
				err = errors.New("no message")
			}
			return err
		},
		"Answer": func() error {
			return owner.Answer((*owner.inbound.Load())[0].conn, []byte("an answer"))
		},
	} {
		_, _ = unix.Read(b.event, make([]byte, 8))
		_, err = unix.Write(b.event, binary.LittleEndian.AppendUint64(nil, 1<<64-2))
		require.NoError(t, err)
		require.NoError(t, unix.SetNonblock(b.event, false))
		ended := make(chan error, 1)
		go func() { ended <- call() }()
		select {
		case err := <-ended:
			require.NoError(t, err, what)
		case <-time.After(limit):
			t.Error(what + " waits for the peer to read its event")
			_, _ = unix.Read(b.event, make([]byte, 8)) // which lets it go on
			require.NoError(t, <-ended)
		}
		require.NoError(t, far.Revoke(t.Context()))
		require.NoError(t, unix.SetNonblock(b.event, true))
	}
}

// TestArenaOutOfTable has a lying owner name an arena that its table has no generation of.
func TestArenaOutOfTable(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, far := shared(t, owner, 4096, 1)
	p := dial(t, b, owner.Addr())
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	g := far.grant()
	g.arena = owner.table.keys
	owner.table.publish(far.key, tagOf(&far.secret, far.key, &g), g)
	_, _, err = p.Import(token)
	require.ErrorIs(t, err, driver.ErrCorrupt)
}

// TestMappingsAreBounded has peers share more than this process may map: the memory is refused, and
// all is given back with the peer.
func TestMappingsAreBounded(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, far := shared(t, owner, 4096, 1)
	p := dial(t, b, owner.Addr())
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	for _, taken := range []struct {
		bytes   uint64
		extents int
	}{{mappedBytesMax, 0}, {0, mappedExtentsMax}} {
		require.NoError(t, b.mapped.take(taken.bytes, taken.extents))
		_, _, err = p.Import(token)
		require.ErrorIs(t, err, driver.ErrFull)
		b.mapped.give(taken.bytes, taken.extents)
	}
	importOf(t, p, far)
	require.Equal(t, 1, b.mapped.extents)
	require.NotZero(t, b.mapped.bytes)
	require.NoError(t, p.Close())
	require.Zero(t, b.mapped.extents)
	require.Zero(t, b.mapped.bytes)
}

// TestOneProcessTakesHalfOfThePlaces also where its connections have ended without the word that it
// is out of our memory: the others are for peers of other processes.
func TestOneProcessTakesHalfOfThePlaces(t *testing.T) {
	var foreign atomic.Bool // the next peer is another process
	identify = func(c *net.UnixConn) (proc.Remote, error) {
		id, err := proc.Identify(c)
		if foreign.Load() {
			id.PID = 0
		}
		return id, err
	}
	t.Cleanup(func() { identify = proc.Identify }) // after the owner has closed
	owner, b := open(t, Config{ConnsMax: 4}), open(t, Config{})
	p := dial(t, b, owner.Addr())
	require.NoError(t, p.sock.Close()) // a program that connects again and again without Close
	require.ErrorIs(t, receive(t, owner, 1)[0].Err, driver.ErrPeerLost)
	dial(t, b, owner.Addr())
	_, err := b.Connect(t.Context(), owner.Addr())
	require.ErrorIs(t, err, driver.ErrFull)
	self := dial(t, owner, owner.Addr())
	foreign.Store(true)
	dial(t, b, owner.Addr())
	foreign.Store(false)

	require.NoError(t, p.Close())
	require.NoError(t, self.Close())
	soon(t, "places are free once their peers say that they are out", func() bool {
		_, err := owner.Receive(make([]driver.Message, 1))
		require.NoError(t, err)
		return len(*owner.inbound.Load()) == 2
	})
	dial(t, b, owner.Addr())
}

// TestConnectBesideClose: Close waits for a handshake under way, which it ends: our event goes to
// the peer while it is ours, and not as the number of another file.
func TestConnectBesideClose(t *testing.T) {
	b := open(t, Config{DialTimeout: time.Hour})
	silentOwner := newAddress("")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: silentOwner.socket(),
		Net: "unixpacket"})
	require.NoError(t, err)
	defer l.Close()
	connected := make(chan error, 1)
	go func() {
		_, err := b.Connect(context.Background(), silentOwner.encode())
		connected <- err
	}()
	conn, err := l.Accept()
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, b.Close())
	select {
	case err := <-connected:
		require.ErrorIs(t, err, driver.ErrClosed)
	case <-time.After(time.Minute):
		t.Fatal("Close has not ended Connect")
	}
	_, err = b.Connect(t.Context(), silentOwner.encode())
	require.ErrorIs(t, err, driver.ErrClosed)
}

// A question that does not go out, because the owner's socket takes nothing, stretches no import.
func TestImportEndsThoughTheQuestionWaits(t *testing.T) {
	clock := testkit.NewClock()
	owner, b := open(t, Config{}), openBy(t, clock, Config{})
	_, far := shared(t, owner, 4096, 1)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	p := dial(t, b, owner.Addr())
	p.sendMu.Lock() // another message waits for room
	ended := make(chan error, 1)
	go func() {
		_, _, err := p.Import(token)
		ended <- err
	}()
	for end := time.Now().Add(limit); ; clock.Advance(b.cfg.DialTimeout) {
		select {
		case err = <-ended:
		case <-time.After(10 * time.Millisecond):
			if time.Now().Before(end) {
				continue
			}
			t.Error("the import waits for its request to go out")
		}
		break
	}
	p.sendMu.Unlock()
	require.ErrorIs(t, err, driver.ErrTimeout)
	importOf(t, p, far)
}

// mute is a Shared that lends nothing more once its memory is registered, until it is freed.
type mute struct {
	driver.Shared
	lent  bool
	freed chan struct{}
}

func (m *mute) Lend(f func([]driver.Extent) error) error {
	if m.lent {
		<-m.freed
		return driver.ErrClosed
	}
	m.lent = true
	return m.Shared.Lend(f)
}

// An owner that answers a part at a time, and never ends, stretches no import: its limit
// counts for the whole answer.
func TestImportEndsThoughTheOwnerAlwaysAddsAPart(t *testing.T) {
	clock := testkit.NewClock()
	owner, b := open(t, Config{}), openBy(t, clock, Config{})
	buf, _ := shared(t, owner, 4096, 1)
	seg := buf.Segment()
	quiet := &mute{Shared: seg.Shared, freed: make(chan struct{})}
	seg.Shared, seg.Secret[0] = quiet, 2
	far, err := owner.Register(seg)
	require.NoError(t, err)
	defer close(quiet.freed)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	p := dial(t, b, owner.Addr())
	list := *owner.inbound.Load()
	ours := list[len(list)-1]
	ended := make(chan error, 1)
	go func() {
		_, _, err := p.Import(token)
		ended <- err
	}()
	soon(t, "the question", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.fetchID == 1
	})
	part := append(answerHead(0, nil, 1, 4096, extentsMax, 1), make([]byte, extentBytes)...)
	fds, open := []int{b.event}, descriptors(t)
	for end := time.Now().Add(limit); time.Now().Before(end); {
		require.NoError(t, ours.sendControl(part, fds))
		fds = nil // each part may have some
		select {
		case err := <-ended:
			require.ErrorIs(t, err, driver.ErrTimeout)
			soon(t, "all descriptors are closed", func() bool { return descriptors(t) == open })
			return
		case <-time.After(10 * time.Millisecond):
			clock.Advance(b.cfg.DialTimeout / 8)
		}
	}
	t.Error("the import goes on for as long as parts come")
}
