// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// ways are those in which bytes move. Where messages carry them an owner that is
// frozen while it copies one of them out of UCX's buffer into its memory is in the
// middle of a few instructions of its own, and ends them when it goes on, before it
// looks at anything else: one message on its connection, and no more. Where it copies
// none it holds nothing. A peer that a busy machine keeps from answering over shared memory for
// Grace is reached by TCP, whatever the way: see connect.
var ways = []struct {
	name string
	sideConfig
	inHand int // bytes of such a message
}{
	{"direct", sideConfig{Direct: true}, 0},
	{"served", sideConfig{}, 0},
	{"messages", sideConfig{UCX: ucx.Config{Transports: "posix,sysv,self"}}, 16 << 10},
	{"tcp", sideConfig{UCX: ucx.Config{Transports: "tcp", Devices: "lo"}}, messageOverTCP},
}

// messageOverTCP is how many bytes one carries.
const messageOverTCP = 60 << 10

// eachWay runs a test over all of them, with nothing left behind by it or by the
// children that it had.
func eachWay(t *testing.T, grace time.Duration, f func(*testing.T, *stage), but ...string) {
	for _, way := range ways {
		if slices.Contains(but, way.name) {
			t.Logf("not %s: the test's comment says why", way.name)
			continue
		}
		t.Run(way.name, func(t *testing.T) {
			var s *stage
			files := t.TempDir()
			leak.Check(t, hostmem.InUse, func() map[string]uint64 { return s.leftOver(files) })
			way.UCX.Grace, way.UCX.Failure = grace, grace
			if way.UCX.Transports != "tcp" {
				way.UCX.Settings = []string{"POSIX_DIR=" + files}
			}
			s = newStage(t, way.sideConfig, (*exec.Cmd).Start)
			s.inHand = way.inHand
			s.connect()
			f(t, s)
		})
	}
}

// leftOver counts what dead children keep of the memory that processes share: files
// of posix, and segments of System V that were theirs.
func (s *stage) leftOver(dir string) map[string]uint64 {
	files, _ := os.ReadDir(dir)
	count := map[string]uint64{"files of shared memory": uint64(len(files))}
	if s == nil {
		return count
	}
	segments, _ := os.ReadFile("/proc/sysvipc/shm")
	for line := range strings.Lines(string(segments)) {
		const creator = 4
		if fields := strings.Fields(line); len(fields) > creator && s.pids[fields[creator]] {
			count["segments of System V"]++
		}
	}
	return count
}

// TestTimedKilled kills a process that others move bytes from and to, and that does so
// itself. The next one is another backend with other memory; ours is what it was.
//
// Not where messages carry the bytes to near peers: a process that dies while it
// copies one into our queue of UCX leaves a place there that is never filled, and UCX
// waits for it for ever. What was under way ends all the same, but nobody near reaches
// this backend any more.
func TestTimedKilled(t *testing.T) {
	eachWay(t, shortGrace, func(t *testing.T, s *stage) {
		for range 2 {
			lease := s.run()
			begin := uptime()
			s.far.kill()
			s.soon("transfers ended", begin, s.ended(), 0)
			at, err := s.near.lastWord()
			if err != nil {
				t.Error(err)
			}
			s.soon("the last word came", begin, at, 0)
			s.revoke(lease)
			s.soon("the lease was revoked", begin, uptime(), 0)
			s.near.poison(inAll)
			s.late("near", s.near.watch(inAll, 300*time.Millisecond, 0))
			begin = uptime()
			if err := s.near.peer.Close(); err != nil {
				t.Error(err)
			}
			s.soon("the peer closed", begin, uptime(), 0)
			s.begin((*exec.Cmd).Start)
			s.connect()
		}
		s.revoke(s.run())
		s.part(shortGrace)
	}, "messages")
}

// TestTimedFrozen stops such a process. Its lease ends long before the grace does, our
// transfers end once it has been silent for Failure, and when it goes on it finds everything
// closed to it. Not where we have mapped its memory: transfers then need nothing of it. Nor by TCP:
// its host answers, see TestTimedPausesLoseNothing.
func TestTimedFrozen(t *testing.T) {
	eachWay(t, shortGrace, func(t *testing.T, s *stage) {
		for range 2 {
			lease := s.run()
			begin := uptime()
			s.far.freeze()
			s.revoke(lease)
			s.soon("the lease was revoked", begin, uptime(), shortGrace/4)
			fill(s.near.kv.Bytes()[:writes*pieceSize], poisonKV)
			s.soon("transfers ended", begin, s.ended(), 2*shortGrace)
			s.near.poison(inAll)
			s.far.poisonKV()
			s.far.thaw()
			s.untouched(inAll, inKV, 500*time.Millisecond)
			s.far.do(order{Do: "lastWord"})
			s.part(shortGrace)
			_, err := s.near.lastWord()
			if err != nil {
				t.Error(err)
			}
			s.connect() // the same processes, and the same memory
		}
		s.revoke(s.run())
		s.part(shortGrace)
	}, "direct", "tcp")
}

// TestTimedAbortFrozen aborts transfers with a process that was just stopped, with what
// both packages have as their defaults. Not where we have mapped its memory, as in TestTimedFrozen.
func TestTimedAbortFrozen(t *testing.T) {
	eachWay(t, 0, func(t *testing.T, s *stage) {
		s.run()
		begin := uptime()
		s.far.freeze()
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		results := make(chan error, pieces)
		for _, tr := range s.near.flood.list {
			go func() { results <- tr.Abort(ctx) }()
		}
		for range pieces {
			if err := <-results; err != nil {
				t.Errorf("abort: %v", err)
			}
		}
		s.soon("aborted", begin, uptime(), 2*time.Second)
		s.ended()
		s.near.poison(inSrc)
		s.far.poisonKV()
		s.far.thaw()
		s.untouched(inSrc, inKV, 500*time.Millisecond)
		s.part(6 * time.Second)
		s.connect()
		s.revoke(s.near.lease)
		lease := s.run()
		if err := lease.Revoke(t.Context()); err != nil {
			t.Error(err)
		}
		s.part(6 * time.Second)
	}, "direct")
}
