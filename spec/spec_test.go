// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// models are what spin is to find: nothing, or a broken promise where a protocol is as it was
// before a mend, or as it must not be.
var models = []struct {
	name, file string
	defines    []string
	broken     bool
}{
	{"shm mapped", "shm_mapped.pml", nil, false},
	{"shm mapped, the epoch before the generation", "shm_mapped.pml", []string{"-DOLD"}, true},
	{"shm foreign", "shm_gate.pml", nil, false},
	{"shm foreign, the epoch before the gate", "shm_gate.pml", []string{"-DOLD"}, true},
	{"tcp", "tcp_ages.pml", nil, false},
	{"tcp, several frames", "tcp_ages.pml", []string{"-DFRAMES=2", "-DMAX=4"}, false},
	{"tcp, a confirmation is no word", "tcp_ages.pml", []string{"-DUNCOUNTED"}, true},
	{"tcp, a longer limit before its confirmation", "tcp_ages.pml",
		[]string{"-DEAGER", "-DFRAMES=2", "-DMAX=4"}, true},
	{"tcp, an owner stopped behind its look", "tcp_ages.pml", []string{"-DSTOPPED"}, true},
	{"chain", "chain.pml", nil, false},
	{"chain, a lost acknowledgement is a refusal", "chain.pml", []string{"-DREFUSED"}, true},
	{"chain, hops are counted before the epoch ends", "chain.pml", []string{"-DPASSED"}, true},
	{"backlog", "backlog.pml", nil, false},
	{"backlog, posts in order", "backlog.pml", []string{"-DORDERED", "-DLIMIT=2"}, false},
	{"backlog, a peer that takes nothing", "backlog.pml", []string{"-DFROZEN"}, false},
	{"backlog, a busy drainer is not told of room", "backlog.pml", []string{"-DNOAGAIN"}, true},
	{"backlog, a rest without another look", "backlog.pml", []string{"-DNOLOOK"}, true},
	{"backlog, a stop unseen behind the queue", "backlog.pml", []string{"-DFROZEN", "-DNORECHECK"},
		true},
	{"ucx mapped", "ucx_near.pml", nil, false},
	{"ucx mapped, a ping answered beside a store", "ucx_near.pml", []string{"-DUNLOCKED"}, true},
	{"ucx mapped, a fence that gave up is forgotten", "ucx_near.pml", []string{"-DFORGETS"}, true},
	{"ucx mapped, a store behind a reset", "ucx_near.pml", []string{"-DSTORES"}, true},
	{"ucx ages", "ucx_ages.pml", nil, false},
	{"ucx ages, several messages", "ucx_ages.pml", []string{"-DFRAMES=2", "-DMAX=4"}, false},
	{"ucx ages, a wait behind the look", "ucx_ages.pml", []string{"-DWAITS"}, true},
	{"ucx ages, a longer limit before its confirmation", "ucx_ages.pml",
		[]string{"-DEAGER", "-DFRAMES=2", "-DMAX=4"}, true},
	{"cuda between processes", "cuda_processes.pml", nil, false},
	{"cuda, the import before the announcement", "cuda_processes.pml", []string{"-DUNANNOUNCED"},
		true},
	{"cuda, no look behind the copies", "cuda_processes.pml", []string{"-DUNJUDGED"}, true},
	{"cuda, the memory before the word of it", "cuda_processes.pml", []string{"-DEARLY"}, true},
}

func TestModels(t *testing.T) {
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			drivertest.SkipIfUnavailable(t, &driver.UnavailableError{
				Backend: "spec", Reason: err.Error(), Fix: "apt-get install " + tool,
			})
		}
	}
	for _, m := range models {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			found := check(t, m.file, m.defines)
			broken := strings.Contains(found, "assertion violated")
			require.Equal(t, m.broken, broken, "a broken promise: %s", found)
			if !m.broken {
				require.Contains(t, found, "errors: 0")
				require.NotContains(t, found, "search depth too small")
				require.NotContains(t, found, "Search not completed")
			}
		})
	}
}

// check searches all states of a model, up to the first fault, and returns what spin says.
func check(t *testing.T, model string, defines []string) string {
	t.Helper()
	dir := t.TempDir()
	source, err := os.ReadFile(model)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, model), source, 0o600))
	run(t, dir, "spin", append(defines, "-a", model)...)
	run(t, dir, "gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c")
	return run(t, dir, "./pan", "-E", "-m1000000")
}

func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %q: %s", name, args, out)
	return string(out)
}
