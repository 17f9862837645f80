// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// compileFlags and searchFlags make spin search all states for broken assertions.
var (
	compileFlags = []string{"-O2", "-DSAFETY", "-DCOLLAPSE"}
	searchFlags  = []string{"-E", "-m1000000"}
)

// model is a file with the mistakes that are built into it.
type model struct {
	name, file string
	defines    []string
	broken     bool
}

// models are what spin is to find: nothing, or a broken promise where a protocol is as it was
// before a mend, or as it must not be.
var models = []model{
	{"shm mapped", "shm_mapped.pml", nil, false},
	{"shm mapped, the epoch before the generation", "shm_mapped.pml", []string{"-DOLD"}, true},
	{"shm mapped, pages used again", "shm_mapped.pml", []string{"-DAGAIN", "-DMOVERS=1"}, false},
	{"shm mapped, pages used again under a writer", "shm_mapped.pml",
		[]string{"-DAGAIN", "-DMOVERS=1", "-DBLIND"}, true},
	{"shm mapped, writers listed too early", "shm_mapped.pml",
		[]string{"-DAGAIN", "-DMOVERS=1", "-DBEFORE"}, true},
	{"shm foreign", "shm_gate.pml", nil, false},
	{"shm foreign, the epoch before the gate", "shm_gate.pml", []string{"-DOLD"}, true},
	{"tcp", "tcp_ages.pml", nil, false},
	{"tcp, several frames", "tcp_ages.pml", []string{"-DFRAMES=2", "-DMAX=4", "-DDRIFT=0"}, false},
	{"tcp, a time worked out as if clocks ran alike", "tcp_ages.pml", []string{"-DALIKE"}, true},
	{"tcp, a wait as if clocks ran alike", "tcp_ages.pml", []string{"-DEXACT"}, true},
	{"tcp, a confirmation is no word", "tcp_ages.pml", []string{"-DUNCOUNTED"}, true},
	{"tcp, a longer limit before its confirmation", "tcp_ages.pml",
		[]string{"-DEAGER", "-DFRAMES=2", "-DMAX=4", "-DDRIFT=0"}, true},
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
	{"ucx ages", "ucx_ages.pml", nil, false},
	{"ucx ages, several messages", "ucx_ages.pml", []string{"-DFRAMES=2", "-DMAX=4"}, false},
	{"ucx ages, a wait behind the look", "ucx_ages.pml", []string{"-DWAITS"}, true},
	{"ucx ages, a longer limit before its confirmation", "ucx_ages.pml",
		[]string{"-DEAGER", "-DFRAMES=2", "-DMAX=4"}, true},
	{"cuda between processes", "cuda_processes.pml", nil, false},
	{"cuda, copies end with their process", "cuda_processes.pml", []string{"-DMORTAL"}, true},
	{"cuda, the import before the announcement", "cuda_processes.pml", []string{"-DUNANNOUNCED"},
		true},
	{"cuda, no look behind the copies", "cuda_processes.pml", []string{"-DUNJUDGED"}, true},
	{"cuda, the memory before the word of it", "cuda_processes.pml", []string{"-DEARLY"}, true},
}

// update has TestModels record what it finds.
var update = flag.Bool("update", false, "write what spin found of changed models to "+verifiedFile)

// TestModels has spin check each model that differs from the one in verified.txt, and fails until
// the result is recorded there. A model that did not change is not checked anew: TestSoakModels
// checks all.
func TestModels(t *testing.T) {
	known := readVerified(t)
	var mu sync.Mutex
	found := maps.Clone(known)
	t.Run("all", func(t *testing.T) {
		for _, m := range models {
			t.Run(m.name, func(t *testing.T) {
				t.Parallel()
				v := known[m.name]
				if m.hash(t) != v.hash {
					v = m.verify(t)
					if !*update {
						t.Errorf("%d states, and spin finds what it should, but %s has another "+
							"model: record it by `%s`", v.states, verifiedFile, recordCommand)
					}
				}
				mu.Lock()
				defer mu.Unlock()
				found[m.name] = v
			})
		}
	})
	if *update && !t.Failed() {
		require.NoError(t, os.WriteFile(verifiedFile, verifiedText(found), 0o666))
		return
	}
	for name := range known {
		require.True(t, slices.ContainsFunc(models, func(m model) bool { return m.name == name }),
			"%s has %q, which is no model: `%s`", verifiedFile, name, recordCommand)
	}
}

// TestSoakModels has spin check all models. The same version of spin finds as many states as
// verified.txt says.
func TestSoakModels(t *testing.T) {
	known := readVerified(t)
	for _, m := range models {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			v := m.verify(t)
			if k := known[m.name]; k.hash == v.hash && k.spin == v.spin {
				require.Equal(t, k.states, v.states)
			}
		})
	}
}

// verify has spin search all states of a model, up to the first fault. It fails the test unless
// spin finds what it is to find.
func (m model) verify(t *testing.T) verified {
	t.Helper()
	for _, tool := range []string{"spin", "gcc"} {
		_, err := exec.LookPath(tool)
		require.NoError(t, err, "the model changed and must be checked: apt-get install "+tool)
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, m.file), m.source(t), 0o600))
	run(t, dir, "spin", append(slices.Clone(m.defines), "-a", m.file)...)
	run(t, dir, "gcc", append(slices.Clone(compileFlags), "-o", "pan", "pan.c")...)
	found := run(t, dir, "./pan", searchFlags...)
	broken := strings.Contains(found, "assertion violated")
	require.Equal(t, m.broken, broken, "a broken promise: %s", found)
	if !m.broken {
		require.Contains(t, found, "errors: 0")
		require.NotContains(t, found, "search depth too small")
		require.NotContains(t, found, "Search not completed")
	}
	stored := regexp.MustCompile(`(?m)^ *(\d+) states, stored`).FindStringSubmatch(found)
	require.NotNil(t, stored, found)
	states, err := strconv.Atoi(stored[1])
	require.NoError(t, err)
	version := strings.Fields(run(t, dir, "spin", "-V")) // Spin Version 6.5.2 -- 6 December 2019
	require.Greater(t, len(version), 2)
	return verified{m.hash(t), version[2], states}
}

func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %q: %s", name, args, out)
	return string(out)
}
