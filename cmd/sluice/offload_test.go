// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

var offloadKeys = []string{"path", "route", "file_blocks", "file_bytes", "blocks_attached",
	"blocks_evicted",
	"blocks_spilled", "spill_bytes", "spill_gbps", "pwrite_gbps", "spill_ratio",
	"blocks_recalled", "recall_bytes", "recall_gbps", "pread_gbps", "recall_ratio"}

// offloadReport runs a replay with a file, and returns what it says of it.
func offloadReport(t *testing.T, to string, args ...string) (report, offload map[string]any) {
	t.Helper()
	o := sluice(t, append([]string{"replay", "--json", "--model", smallModel, "--offload", to},
		args...)...)
	wantStory(t, o)
	require.Contains(t, o.stderr, "reading back the blocks that were spilled")
	report = decode(t, o.stdout).(map[string]any)
	wantKeys(t, "report", report, append([]string{"offload"}, replayKeys...)...)
	wantKeys(t, "offload", report["offload"], offloadKeys...)
	wantNumbers(t, report, map[string]float64{"mismatches": 0, "leaked": 0})
	return report, report["offload"].(map[string]any)
}

// indexerBlock is a block of smallModel; in a file it takes whole pages.
const indexerBlock = 61 * 132 * 512

func TestReplayOffload(t *testing.T) {
	t.Parallel()
	_, f := offloadReport(t, "ssd", "--trace", smallTrace(t, 8), "--requests", "8", "--backend",
		"shm")
	// 9 blocks come, 11 times a request has one that is there; at the end all 9 once more.
	wantNumbers(t, f, map[string]float64{"file_blocks": 9, "blocks_attached": 0,
		"blocks_evicted": 0, "blocks_spilled": 9,
		"spill_bytes": 9 * indexerBlock, "blocks_recalled": 20, "recall_bytes": 20 * indexerBlock})
	for _, key := range []string{"spill_gbps", "pwrite_gbps", "spill_ratio", "recall_gbps",
		"pread_gbps", "recall_ratio"} {
		if f[key].(float64) <= 0 {
			t.Errorf("%s is %v", key, f[key])
		}
	}
}

// TestReplayOffloadInLittleRoom: the file is smaller than what comes, the oldest make way.
func TestReplayOffloadInLittleRoom(t *testing.T) {
	t.Parallel()
	_, f := offloadReport(t, "ssd:size=13MiB,durable=true", "--trace", smallTrace(t, 8),
		"--requests", "8")
	wantNumbers(t, f, map[string]float64{"file_blocks": 3})
	if f["blocks_evicted"].(float64) < 6 || f["blocks_spilled"].(float64)-
		f["blocks_evicted"].(float64) != 3 {
		t.Errorf("%v spilled, %v evicted", f["blocks_spilled"], f["blocks_evicted"])
	}
}

func TestReplayOffloadWithAbortsAndFaults(t *testing.T) {
	t.Parallel()
	trace := smallTrace(t, 8)
	for _, more := range [][]string{{"--abort-rate", "0.5"}, {"--abort-rate", "0.5", "--overlap"},
		{"--fault", "failing"}} {
		r, f := offloadReport(t, "ssd", append([]string{"--trace", trace, "--requests", "8"},
			more...)...)
		if f["blocks_spilled"].(float64) < 1 ||
			f["blocks_recalled"].(float64) < f["blocks_spilled"].(float64) {
			t.Errorf("%v: %v, aborted %v", more, f, r["aborted"])
		}
	}
}

// TestReplayOffloadKeepsAFile: the next replay takes it up, and finds what has become wrong in it.
func TestReplayOffloadKeepsAFile(t *testing.T) {
	t.Parallel()
	trace, path := smallTrace(t, 8), filepath.Join(t.TempDir(), "blocks")
	args := []string{"--trace", trace, "--requests", "8"}
	_, f := offloadReport(t, "ssd:file="+path, args...)
	wantNumbers(t, f, map[string]float64{"blocks_attached": 0, "blocks_spilled": 9})
	if f["path"] != path {
		t.Errorf("the file is called %v", f["path"])
	}
	_, f = offloadReport(t, "ssd:file="+path, args...)
	wantNumbers(t, f, map[string]float64{"blocks_attached": 9, "blocks_spilled": 0,
		"blocks_recalled": 9 + 20 + 9})

	// One byte in the midst of the third block, as a disk that has gone bad would have it.
	const at = 2<<20 + 2*(indexerBlock+2048) + 30*132*512
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	var b [1]byte
	if _, err := file.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := file.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, file.Close())
	o := sluice(t, append([]string{"replay", "--json", "--model", smallModel, "--offload",
		"ssd:file=" + path}, args...)...)
	r := decode(t, o.stdout).(map[string]any)
	if o.status != statusFailed || r["mismatches"].(float64) < 2 ||
		!strings.Contains(o.stderr, path+": block 2, at byte ") {
		t.Errorf("status %d, %v mismatches, stderr %q", o.status, r["mismatches"], o.stderr)
	}
	if first := r["first_mismatches"].([]any); !strings.Contains(first[1].(string),
		"layer 30 at byte "+strconv.Itoa(at)) {
		t.Errorf("the mismatch is called %q", first[1])
	}

	o = sluice(t, "replay", "--model", "llama3.1-8b", "--requests", "1", "--offload",
		"ssd:file="+path)
	if o.status != statusFailed || !strings.Contains(o.stderr, "choose another file") ||
		!strings.Contains(o.stderr, path) {
		t.Errorf("a file of another model: %+v", o)
	}
}

func TestReplayOffloadErrors(t *testing.T) {
	t.Parallel()
	for _, to := range []string{"hdd", "", "ssd:size=much", "ssd:file=", "ssd:room=1", "ssd:"} {
		if o := sluice(t, "replay", "--offload", to); o.status != statusUsage ||
			!strings.Contains(o.stderr, "--offload") {
			t.Errorf("%v: %+v", to, o)
		}
	}
	trace, dir := smallTrace(t, 1), t.TempDir()
	other := filepath.Join(dir, "other")
	require.NoError(t, os.WriteFile(other, make([]byte, 8192), 0o600))
	for _, c := range []struct {
		to    string
		wants []string
	}{
		{"ssd:dir=" + other, []string{other, "is not a directory: name one"}},
		{"ssd:size=1024TiB", []string{"no space left on device", "/blocks needs",
			"give a smaller size"}},
		{"ssd:size=1MiB", []string{"a block takes", "size of --offload is 1MiB"}},
		{"ssd:file=" + dir, []string{dir, "is a directory"}},
		{"ssd:file=" + other, []string{other, "no store", "choose another file"}},
	} {
		o := sluice(t, "replay", "--model", smallModel, "--trace", trace, "--offload", c.to)
		for _, want := range c.wants {
			if o.status != statusFailed || !strings.Contains(o.stderr, want) {
				t.Errorf("%v: no %q in %+v", c.to, want, o)
			}
			if strings.Contains(want, "directory: name") || strings.HasPrefix(want, "make the") {
				require.NotContains(t, o.stderr, "starting", "after memory was prepared for it")
			}
		}
	}
}

// TestTimedReplayOffloadLeavesNoFile: what command leaves in its temporary directory is an error.
func TestTimedReplayOffloadLeavesNoFile(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		c, _, stderr := command(t, append(slow(t), "--offload", "ssd")...)
		require.NoError(t, c.Start())
		pids := awaitChildren(t, c.Process.Pid, 2)
		time.Sleep(time.Second) // into the work
		require.NoError(t, c.Process.Signal(sig))
		if got := status(t, c.Wait()); sig == syscall.SIGINT && got != statusInterrupted {
			t.Errorf("status %d, stderr %q", got, stderr)
		}
		for start := time.Now(); running(pids[0]) ||
			running(pids[1]); time.Sleep(10 * time.Millisecond) {
			if time.Since(start) > time.Minute {
				testkit.FatalBroken(t, "children %v outlive their parent", pids)
			}
		}
	}
}

// TestReplayOffloadAfterAKill: every block that the file of a killed process says it holds is
// right.
func TestReplayOffloadAfterAKill(t *testing.T) {
	t.Parallel()
	trace, path := smallTrace(t, 40), filepath.Join(t.TempDir(), "blocks")
	args := []string{"replay", "--model", smallModel, "--trace", trace, "--requests", "40",
		"--offload", "ssd:file=" + path}
	c, _, _ := command(t, append(args, "--speed", "0.02")...) // 80 s
	require.NoError(t, c.Start())
	pids := awaitChildren(t, c.Process.Pid, 2)
	victim := awaitRole(t, pids, "replay-decode")
	for start := time.Now(); records(t, path) < 3; time.Sleep(5 * time.Millisecond) {
		if time.Since(start) > 2*time.Minute {
			t.Fatal("nothing is spilled")
		}
	}
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	if got := status(t, c.Wait()); got != statusFailed {
		t.Errorf("status %d", got)
	}
	_, f := offloadReport(t, "ssd:file="+path, "--trace", trace, "--requests", "40")
	if f["blocks_attached"].(float64) < 3 {
		t.Errorf("%v blocks were found", f["blocks_attached"])
	}
}

// records counts what a store says it holds.
func records(t *testing.T, path string) (n int) {
	t.Helper()
	b := make([]byte, 64*100)
	file, err := os.Open(path)
	if err != nil {
		return 0 // not made yet
	}
	defer file.Close()
	if _, err := file.ReadAt(b, 4096); err != nil {
		return 0
	}
	for ; len(b) > 0; b = b[64:] {
		if string(b[:64]) != string(make([]byte, 64)) {
			n++
		}
	}
	return n
}
