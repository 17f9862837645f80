// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/withhold"
)

const heldBytes = 64 << 10

// heldUp has a write of heldBytes zeros stand in the kernel, behind the gate: the pages of its
// source do not come until they are supplied. ended waits for the write and returns its outcome.
func heldUp(t *testing.T, b *Backend, addr, token []byte) (
	source *withhold.Memory, ended func() error,
) {
	t.Helper()
	near, here := share(t, b, drivertest.ForeignMemory, heldBytes)
	source, err := withhold.Pages(here)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() { source.Supply(t) }) // before Close, which waits for the write
	p := dial(t, b, addr)
	key, _ := take(t, p, token)
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{
			Len: heldBytes, LocalKey: near.Key(), RemoteKey: key}}})
	}()
	source.Await(t)
	return source, func() error {
		require.NoError(t, <-submitted)
		return await(t, b, 1)
	}
}

// TestCloseAgainInTheKernel: a Close that found no proof leaves the writer in the middle of its
// copy, and so the next one needs the same proof.
func TestCloseAgainInTheKernel(t *testing.T) {
	owner, b := open(t, Config{Grace: 10 * time.Millisecond}), open(t, Config{})
	far, there := share(t, owner, drivertest.ForeignMemory, heldBytes)
	fill(there, 0x11)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	for range 30 {
		require.ErrorIs(t, far.Close(), driver.ErrTimeout)
	}
	require.Len(t, owner.gate.shut, 1, "one for the writer, however often it is looked at")
	source.Supply(t)
	soon(t, "the memory is closed", func() bool { return far.Close() == nil })
	after := bytes.Clone(there)
	require.NoError(t, ended())
	require.True(t, bytes.Equal(after, there), "bytes landed after Close")
}

// TestBackendCloseInTheKernel: a backend that closes under a writer in the middle of its copy says
// that bytes may land yet.
func TestBackendCloseInTheKernel(t *testing.T) {
	owner, err := New(Config{Grace: 10 * time.Millisecond})
	require.NoError(t, err)
	b := open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, heldBytes)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	for range 2 {
		require.ErrorIs(t, owner.Close(), driver.ErrTimeout)
	}
	source.Supply(t)
	require.NoError(t, ended())
}

// TestCloseAgainMapped is the same with memory that peers map, of which the owner can keep no
// writer out: its range shares a page with others.
func TestCloseAgainMapped(t *testing.T) {
	owner, b := open(t, Config{Grace: time.Millisecond}), open(t, Config{})
	buf, err := hostmem.Alloc(4096, hostmem.Options{Purpose: "test", Huge: hostmem.HugeNone})
	require.NoError(t, err)
	t.Cleanup(func() { _ = owner.Close(); _ = buf.Close() })
	seg := buf.Segment()
	seg.Only = driver.Ranges{{Off: 8, Len: 64}}
	m, err := owner.Register(seg)
	require.NoError(t, err)
	far := m.(*memory)
	near, src := share(t, b, drivertest.ForeignMemory, 4096)
	fill(src, late)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, spotMapped, driver.Desc{Len: 64, Remote: 8,
		LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
	for range 3 {
		require.ErrorIs(t, far.Close(), driver.ErrBusy)
	}
	require.NoError(t, release())
	require.NoError(t, far.Close())
}

// closingOwner makes the test binary an owner that closes its memory; its Grace follows.
const closingOwner = "closing "

// serveClose waits for a line, says that it begins to close its memory, and says how that ended.
func serveClose(grace string) int {
	if err := closeOnce(grace); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func closeOnce(grace string) error {
	patient, err := time.ParseDuration(grace)
	if err != nil {
		return err
	}
	space, err := drivertest.ForeignMemory(heldBytes)
	if err != nil {
		return err
	}
	b, m, err := offer(Config{Grace: patient}, space)
	if err != nil {
		return err
	}
	in := bufio.NewReader(os.Stdin)
	if _, err := in.ReadString('\n'); err != nil {
		return b.Close()
	}
	fmt.Println("closing")
	fmt.Println(m.Close())
	return b.Close()
}

// TestCloseOfAnOwnerThatStoodStill: an owner that is not run while its Close waits for a writer has
// not waited for the writer.
func TestCloseOfAnOwnerThatStoodStill(t *testing.T) {
	// A machine that is so busy that the owner is frozen late leaves it no time: then with a longer
	// Grace.
	for grace := 200 * time.Millisecond; !closesAfterAStandstill(t, grace); grace *= 2 {
		require.Less(t, grace, 4*time.Second, "the owner is frozen too late")
	}
}

// closesAfterAStandstill reports false where the owner may have run for all the time that its Close
// has.
func closesAfterAStandstill(t *testing.T, grace time.Duration) bool {
	t.Helper()
	o := startOwner(t, closingOwner+grace.String(), 0)
	b := open(t, Config{})
	source, ended := heldUp(t, b, o.addr, o.token)
	begin := time.Now()
	fmt.Fprintln(o.in)
	line, err := o.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "closing\n", line)
	time.Sleep(grace + grace/4) // it has taken the gate away
	o.freeze(t)
	ran := time.Since(begin)
	time.Sleep(2 * grace)
	begin = time.Now()
	o.thaw(t)
	time.Sleep(grace / 8) // it looks at the writer some more times
	source.Supply(t)
	require.NoError(t, ended())
	ran += time.Since(begin)
	line, err = o.out.ReadString('\n')
	require.NoError(t, err)
	if ran > grace*7/4 {
		return false
	}
	require.Equal(t, fmt.Sprintln(nil), line)
	return true
}
