// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/testpoint"
)

// childVariable makes the test binary a process that stores blocks for ever in the memory file that
// it names, says on its output which are done, and ends itself by SIGKILL as pointVariable says: as
// it has come to that point so often.
const childVariable, pointVariable, timesVariable = "SLUICE_TEST_CACHE", "SLUICE_TEST_POINT",
	"SLUICE_TEST_TIMES"

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
	n := openNode(tb, path, killBlocks, withDisk(path+".disk", killOnDisk))
	times, err := strconv.Atoi(os.Getenv(timesVariable))
	if err != nil {
		return err
	}
	testpoint.Set(func(point string) {
		if point == os.Getenv(pointVariable) {
			if times--; times == 0 {
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		}
	})
	for id := uint64(1); ; id += 3 {
		n.put(tb, keysOf(id, id+1, id+2))
		if id%5 == 0 {
			n.ns.Remove(keysOf(id + 1))
			fmt.Println("removed", id+1)
		}
		fmt.Println("stored", id+2)
	}
}

// TestKill ends a process that stores, at each step of a commit and of an eviction: what a new one
// finds is what was committed, with its bytes, and it is not fewer than what the file has room for.
func TestKill(t *testing.T) {
	for _, point := range []string{"cache: reserved", "cache: entered", "cache: landed",
		"cache: summed", "cache: committed", "cache: withdrawn", "cache: left", "cache: on disk",
		"cache: recorded", "cache: leaves its disk", "cache: cleared"} {
		for _, times := range []string{"1", "7", "40"} {
			t.Run(point+" "+times, func(t *testing.T) {
				path := memoryFile(t)
				child := exec.Command(os.Args[0])
				child.Env = append(os.Environ(), childVariable+"="+path, pointVariable+"="+point,
					timesVariable+"="+times)
				out, err := child.StdoutPipe()
				require.NoError(t, err)
				child.Stderr = os.Stderr
				require.NoError(t, child.Start())
				last, gone := uint64(0), map[uint64]bool{}
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
				}
				require.ErrorContains(t, child.Wait(), "killed")

				booted := times == "40" // then the memory is gone, too
				if booted {
					require.NoError(t, os.Remove(path))
				}
				n := openNode(t, path, killBlocks, withDisk(path+".disk", killOnDisk))
				require.Empty(t, n.Attached().Fresh)
				var ids []uint64
				for id := uint64(1); id <= last+3; id++ {
					ids = append(ids, id)
				}
				found := 0
				for len(ids) > 0 {
					part := ids[:min(64, len(ids))]
					ids = ids[len(part):]
					for k, outcome := range n.get(t, keysOf(part...)) {
						require.Contains(t, []Outcome{Done, Missing}, outcome)
						if outcome == Done {
							require.False(t, gone[part[k]], "block %d was removed", part[k])
							found++
						}
					}
				}
				require.GreaterOrEqual(t, found, n.Attached().Blocks)
				require.GreaterOrEqual(t, found, min(int(last)-len(gone), killOnDisk-8))
				// and it goes on
				require.Equal(t, all(Done, 3), n.put(t, keysOf(1<<40, 1<<40+1, 1<<40+2)))
				require.Equal(t, all(Done, 3), n.get(t, keysOf(1<<40, 1<<40+1, 1<<40+2)))
				n.drained(t)
			})
		}
	}
}
