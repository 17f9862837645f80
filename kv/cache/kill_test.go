// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// childVariable makes the test binary a process that stores blocks for ever in the memory file that
// it names, says on its output which are done, and ends itself by SIGKILL as pointVariable says: as
// it has come to that point so often.
const (
	childVariable = "SLUICE_TEST_CACHE"
	wayVariable   = "SLUICE_TEST_WAY" // to the disk, of killWays
	pointVariable = "SLUICE_TEST_POINT"
	timesVariable = "SLUICE_TEST_TIMES"
	firstVariable = "SLUICE_TEST_FIRST"
	stopVariable  = "SLUICE_TEST_STOP" // set: by SIGSTOP instead
)

// killWays are the ways to the disk.
var killWays = map[string]posix.Config{"ring": {Threads: 4}, sealedWay: {Threads: 4},
	"threads": {Threads: 4, Path: posix.PathThreads}}

const sealedWay = "sealed"

// killConfig is that of the cache of the child, and of those that go on.
func killConfig(tb testing.TB, path, way string) func(*Config) {
	return func(c *Config) {
		withDisk(path+".disk", killOnDisk)(c)
		if way == sealedWay {
			sealed(tb, path, 1)(c)
		}
	}
}

// oddBytes is the length of a block that ends within a sector: posix writes its end another way.
const oddBytes = blockBytes - 511

func TestMain(m *testing.M) {
	if path, ok := os.LookupEnv(childVariable); ok {
		fmt.Fprintln(os.Stderr, storeForEver(path))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// killBlocks is the room of the cache of the child, which stores more than that.
const killBlocks, killOnDisk = 32, 48

// childTB is what openNode and put need in a process that is no test.
type childTB struct {
	testing.TB
	ctx context.Context
}

func (childTB) Helper()                    {}
func (childTB) Cleanup(func())             {}
func (c childTB) Context() context.Context { return c.ctx }
func (childTB) FailNow()                   { os.Exit(1) }
func (childTB) Errorf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

func storeForEver(path string) error {
	tb := childTB{ctx: context.Background()}
	way := os.Getenv(wayVariable)
	n := openBy(tb, path, killBlocks, killWays[way], killConfig(tb, path, way))
	n.place.Run = oddBytes
	times, err := strconv.Atoi(os.Getenv(timesVariable))
	if err != nil {
		return err
	}
	first, err := strconv.ParseUint(os.Getenv(firstVariable), 10, 64)
	if err != nil {
		return err
	}
	testpoint.Set(func(point string) {
		if point == os.Getenv(pointVariable) {
			if times--; times == 0 {
				if _, stop := os.LookupEnv(stopVariable); stop {
					testpoint.StopProcess()
					return
				}
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		}
	})
	if _, ok := os.LookupEnv(replaceVariable); ok {
		replaceForEver(tb, n, first)
	}
	for id := first; ; id += 3 {
		n.put(tb, keysOf(id, id+1, id+2))
		if id%5 == 0 {
			if err := n.ns.Remove(keysOf(id + 1)); err != nil {
				return err
			}
			fmt.Println("removed", id+1)
		}
		fmt.Println("stored", id+2)
	}
}

// killed runs a process that stores blocks from a number on, until it kills itself at a point, or
// without one is killed once it has told so often of what it has done. It returns the last block
// that it told of, and those that it removed.
func killed(t *testing.T, path, way, point string, times int, first uint64) (last uint64,
	gone map[uint64]bool) {
	t.Helper()
	child, out := startChild(t, path, way, point, times, first)
	tells := times
	if point != "" {
		tells = 0
	}
	return follow(t, child, out, tells, first)
}

// startChild starts the process that killed tells of.
func startChild(t *testing.T, path, way, point string, times int, first uint64,
	env ...string) (*exec.Cmd, io.Reader) {
	t.Helper()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+path, wayVariable+"="+way,
		pointVariable+"="+point, timesVariable+"="+strconv.Itoa(times),
		firstVariable+"="+strconv.FormatUint(first, 10))
	child.Env = append(child.Env, env...)
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	child.Stderr = os.Stderr
	require.NoError(t, child.Start())
	return child, out
}

// follow reads what a process tells until it is killed: by itself or by another, or here once it
// has told so often, if that is not 0.
func follow(t *testing.T, child *exec.Cmd, out io.Reader, tells int, first uint64) (last uint64,
	gone map[uint64]bool) {
	t.Helper()
	last, gone = first-1, map[uint64]bool{}
	count := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var what string
		var id uint64
		_, err := fmt.Sscan(lines.Text(), &what, &id)
		require.NoError(t, err)
		if what == "removed" {
			gone[id] = true
		} else {
			last = id
		}
		if count++; count == tells {
			require.NoError(t, child.Process.Kill())
		}
	}
	require.ErrorContains(t, child.Wait(), "killed")
	return last, gone
}

// goesOn opens the cache that a killed process has left: what it finds is what was committed, with
// its bytes, and it is not fewer than what the files have room for. booted says that the memory
// file is gone, too.
func goesOn(t *testing.T, path, way string, booted bool, first, last uint64,
	gone map[uint64]bool) {
	t.Helper()
	if booted {
		require.NoError(t, os.Remove(path))
	}
	n := openBy(t, path, killBlocks, killWays[way], killConfig(t, path, way))
	n.place.Run = oddBytes
	require.Empty(t, n.Attached().Fresh+n.Stats().Disks[0].Fresh)
	var ids []uint64
	for id := first; id <= last+3; id++ {
		ids = append(ids, id)
	}
	found := 0
	for len(ids) > 0 {
		some := ids[:min(64, len(ids))]
		ids = ids[len(some):]
		for k, outcome := range n.get(t, keysOf(some...)) {
			require.Contains(t, []Outcome{Done, Missing}, outcome)
			if outcome == Done {
				require.False(t, gone[some[k]], "block %d was removed", some[k])
				found++
			}
		}
	}
	if first == 1 { // else what was there before is found, too
		require.GreaterOrEqual(t, found, n.Attached().Blocks)
	}
	require.GreaterOrEqual(t, found, min(int(last-first+1)-len(gone), killOnDisk-8))
	require.Equal(t, all(Done, 3), n.put(t, keysOf(1<<60, 1<<60+1, 1<<60+2)))
	require.Equal(t, all(Done, 3), n.get(t, keysOf(1<<60, 1<<60+1, 1<<60+2)))
	n.ns.Remove(keysOf(1<<60, 1<<60+1, 1<<60+2))
	n.drained(t)
	n.close(t)
}

// killPoints are the steps of a commit and of an eviction.
var killPoints = []string{"cache: reserved", "cache: entered", "cache: landed", "cache: summed",
	"cache: committed", "cache: withdrawn", "cache: left", "cache: on disk", "cache: recorded",
	"cache: leaves its disk", "cache: cleared"}

// TestKill ends a process that stores, at each step of a commit and of an eviction, and has another
// one go on.
func TestKill(t *testing.T) {
	for _, point := range killPoints {
		for _, times := range []int{1, 7, 40} {
			t.Run(fmt.Sprint(point, " ", times), func(t *testing.T) {
				path := memoryFile(t)
				last, gone := killed(t, path, "ring", point, times, 1)
				goesOn(t, path, "ring", times == 40, 1, last, gone)
			})
		}
	}
}

// TestStopped is TestKill by SIGSTOP. While the process stands nobody else gets its files, and is
// told why. Then it is let go on, and stores 60 times more, or it is killed as it stands.
func TestStopped(t *testing.T) {
	for _, point := range killPoints {
		for _, goOn := range []bool{true, false} {
			t.Run(fmt.Sprint(point, " goes on ", goOn), func(t *testing.T) {
				path := memoryFile(t)
				child, out := startChild(t, path, "ring", point, 7, 1, stopVariable+"=")
				var status unix.WaitStatus
				_, err := unix.Wait4(child.Process.Pid, &status, unix.WUNTRACED, nil)
				require.NoError(t, err)
				require.True(t, status.Stopped())

				b, err := mem.New(mem.Config{})
				require.NoError(t, err)
				e, err := engine.Open(engine.Config{Name: "other", Schedule: &engine.Schedule{},
					Backends: []driver.Backend{b}})
				require.NoError(t, err)
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				_, err = Open(ctx, Config{Engine: e, Blocks: 2 * killBlocks, Memory: MemoryConfig{
					Path: path, Bytes: killBlocks * blockBytes, Extent: 8 * blockBytes}})
				cancel()
				require.ErrorIs(t, err, engine.ErrBusy)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.NoError(t, e.Close())

				tells := 60
				if goOn {
					require.NoError(t, child.Process.Signal(unix.SIGCONT))
				} else {
					require.NoError(t, child.Process.Kill())
					tells = 0
				}
				last, gone := follow(t, child, out, tells, 1)
				goesOn(t, path, "ring", false, 1, last, gone)
			})
		}
	}
}

// TestKilledAnywhere is TestKill at any moment, again and again with the same files, by both ways
// to the disk.
func TestKilledAnywhere(t *testing.T) { killedAnywhere(t, 1, 6) }

func TestSoakKilledAnywhere(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	killedAnywhere(t, seed, 200)
}

func killedAnywhere(t *testing.T, seed uint64, rounds int) {
	for way := range killWays {
		t.Run(way, func(t *testing.T) {
			path, first := memoryFile(t), uint64(1)
			random := rand.New(rand.NewPCG(seed, 1))
			for range rounds {
				last, gone := killed(t, path, way, "", 1+random.IntN(60), first)
				goesOn(t, path, way, random.IntN(2) == 0, first, last, gone)
				first = last + 1000
			}
		})
	}
}
