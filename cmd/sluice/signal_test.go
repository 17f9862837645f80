// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// slow is a replay that would take minutes: it goes at a crawl.
func slow(t *testing.T) []string {
	return []string{"replay", "--model", smallModel, "--requests", "8", "--trace", smallTrace(t, 8),
		"--speed", "0.001", "--timeout", answerLimit.String()}
}

func TestTimedSignalsEndCleanly(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			for args, children := range map[string]int{
				strings.Join(slow(t), " "):         2,
				"bench --backend shm --seconds 60": 3,
			} {
				c, stdout, stderr := command(t, strings.Fields(args)...)
				require.NoError(t, c.Start())
				pids := awaitChildren(t, c.Process.Pid, children)
				time.Sleep(300 * time.Millisecond) // into the work
				require.NoError(t, c.Process.Signal(sig))
				start := time.Now()
				require.EqualValues(t, statusInterrupted, status(t, c.Wait()),
					"%s: status, stderr %s", args, stderr)
				if took := time.Since(start); took > noticed {
					t.Errorf("%s: took %v to end", args, took)
				}
				if stdout.Len() > 0 || !strings.Contains(stderr.String(), "interrupted") {
					t.Errorf("%s: stdout %q, stderr %q", args, stdout, stderr)
				}
				wantGone(t, pids)
			}
		})
	}
}

// TestTimedInterruptPrintsTheRows: three lanes, of which the first has been measured. timeout(1)
// signals twice.
func TestTimedInterruptPrintsTheRows(t *testing.T) {
	c, stdout, stderr := command(t, "bench", "--lane", "process,host,tcp", "--size", "656",
		"--seconds", "2", "--beside", "none")
	require.NoError(t, c.Start())
	time.Sleep(5 * time.Second)
	require.NoError(t, c.Process.Signal(syscall.SIGINT))
	time.Sleep(20 * time.Millisecond)
	_ = c.Process.Signal(syscall.SIGTERM) // it may have ended
	require.Equal(t, statusInterrupted, status(t, c.Wait()), stderr)
	require.Contains(t, stderr.String(), "interrupted")
	require.Contains(t, stdout.String(), "sluice-mem")
}

func TestKilledParentLeavesNoChild(t *testing.T) {
	t.Parallel()
	c, _, _ := command(t, slow(t)...)
	require.NoError(t, c.Start())
	pids := awaitChildren(t, c.Process.Pid, 2)
	require.NoError(t, c.Process.Kill())
	_ = c.Wait() // killed
	for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(10 * time.Millisecond) {
		if running(pids[0]) || running(pids[1]) {
			continue
		}
		return
	}
	t.Errorf("children %v outlive their parent", pids)
}

// TestTimedParentThatWasStopped: Ctrl-Z for longer than the limit, then fg.
func TestTimedParentThatWasStopped(t *testing.T) {
	t.Parallel()
	c, stdout, stderr := command(t, "replay", "--model", smallModel, "--requests", "6", "--trace",
		smallTrace(t, 6),
		"--speed", "0.15", // takes 1.3 s and what it takes to begin
		"--timeout", answerLimit.String())
	require.NoError(t, c.Start())
	awaitChildren(t, c.Process.Pid, 2)
	time.Sleep(500 * time.Millisecond)
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
		require.NoError(t, c.Process.Signal(sig))
		if sig == syscall.SIGSTOP {
			time.Sleep(answerLimit + 2*time.Second)
		}
	}
	if got := status(t, c.Wait()); got != 0 || !strings.Contains(stdout.String(), "mismatches  0") {
		t.Errorf("status %d, stdout %q, stderr %q", got, stdout, stderr)
	}
}

// commandLine is that of a process.
func commandLine(t *testing.T, pid int) string {
	t.Helper()
	return strings.ReplaceAll(readProc(pid, "cmdline"), "\x00", " ")
}

// awaitRole returns which process has a role in its command line. A child that has
// not got as far as exec still has its parent's.
func awaitRole(t *testing.T, pids []int, role string) int {
	t.Helper()
	for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(5 * time.Millisecond) {
		for _, pid := range pids {
			if strings.Contains(commandLine(t, pid), role) {
				return pid
			}
		}
	}
	t.Fatalf("no %s among %v", role, pids)
	return 0
}

// TestTimedDeadAndFrozenProcessesAreNamed: the error must name the one, not what the
// other says about it, within the limit and a little.
func TestTimedDeadAndFrozenProcessesAreNamed(t *testing.T) {
	t.Parallel()
	for _, side := range []string{"prefill", "decode"} {
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			t.Run(fmt.Sprintf("%s %v", side, sig), func(t *testing.T) {
				t.Parallel()
				c, stdout, stderr := command(t, slow(t)...)
				require.NoError(t, c.Start())
				pids := awaitChildren(t, c.Process.Pid, 2)
				victim := awaitRole(t, pids, "replay-"+side)
				time.Sleep(700 * time.Millisecond) // into the work
				start := time.Now()
				require.NoError(t, syscall.Kill(victim, sig))
				if got := status(t, c.Wait()); got != statusFailed || stdout.Len() > 0 {
					t.Errorf("status %d, stdout %q", got, stdout)
				}
				if took := time.Since(start); took > noticed {
					t.Errorf("took %v to notice", took)
				}
				if !strings.Contains(stderr.String(), fmt.Sprintf("sluice replay: %s "+
					"process (pid %d)", side, victim)) {
					t.Errorf("stderr %q", stderr)
				}
				wantGone(t, pids)
			})
		}
	}
}
