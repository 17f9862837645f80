// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// untouched is a choice that would be measured.
func untouched() *choice { return newChoice(func() Choice { return Choice{Why: "measured"} }) }

// written is a file of that content.
func written(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "copy.json")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

func tunedText(t *testing.T, c Choice, change func(*Tuned)) string {
	t.Helper()
	file := c.File()
	if change != nil {
		change(&file)
	}
	text, err := json.Marshal(file)
	require.NoError(t, err)
	return string(text)
}

func TestConfigure(t *testing.T) {
	last := Variants()[len(Variants())-1]
	c := Choice{Way: Way{last, 4321}, From: 1 << 21, Why: "it won"}
	path := written(t, tunedText(t, c, nil))
	for how, want := range map[string]struct {
		way  Way
		from uint64
		why  string
	}{
		"":            {Way{}, 0, "measured"},
		last.String(): {Only(last).Way, 0, last.String() + ", as configured"},
		path:          {c.Way, 1 << 21, "it won; measured " + time.Now().UTC().Format("2006-")},
	} {
		p := untouched()
		require.NoError(t, p.configure(how, ThisMachine))
		require.NoError(t, p.configure(how, ThisMachine), "the same once more")
		got := p.chosen()
		require.Equal(t, want.way, got.Way)
		require.Equal(t, want.from, got.From)
		require.True(t, strings.HasPrefix(got.Why, want.why), got.Why)
		if how != "" {
			err := p.configure("other", ThisMachine)
			require.ErrorContains(t, err, "this process has one choice, and that was made by "+
				`"`+how+`"`)
			require.Equal(t, got, p.chosen())
		}
	}
}

// TestConfigureRefuses names what is wrong and the cure; the choice stays what it was.
func TestConfigureRefuses(t *testing.T) {
	c := Only(Plain)
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	const broken = "is not what sluice doctor --tune writes"
	for name, tc := range map[string]struct{ how, says string }{
		"a name": {"quick", "this machine has " + plainName},
		"cut": {written(t, tunedText(t, c, nil)[:50]),
			broken + " (unexpected end of JSON input): let it write the file anew"},
		"empty": {written(t, ""), broken},
		"other": {written(t, `{"results":[]}`),
			broken + " (variant, run or machine is missing)"},
		"two": {written(t, tunedText(t, c, nil)+"{}"), broken},
		"a processor": {written(t, tunedText(t, c, func(f *Tuned) { f.Machine.CPU = "Z80" })),
			"was measured on another machine (Z80, "},
		"a cache": {written(t, tunedText(t, c, func(f *Tuned) {
			f.Machine.Caches = []string{"L1 1K"}
		})), "run sluice doctor --tune here"},
		"a variant": {written(t, tunedText(t, c, func(f *Tuned) { f.Variant = "mmx" })),
			"run sluice doctor --tune of this build"},
		"no file":  {"/no/where/copy.json", "no such file"},
		"a folder": {t.TempDir(), "is no file"},
		"a pipe":   {fifo, "is no file"},
		"no end":   {"/dev/zero", "is no file"},
	} {
		p := untouched()
		err := p.configure(tc.how, ThisMachine)
		require.ErrorContains(t, err, tc.says, name)
		require.True(t, errors.Is(err, driver.ErrBounds) || errors.Is(err, os.ErrNotExist), name)
		require.Equal(t, "measured", p.chosen().Why)
		require.NoError(t, p.configure(Plain.String(), ThisMachine), "after an error another may")
	}
}

func TestMachines(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"index0/level": "1\n", "index0/size": "48K\n",
		"index1/level": "3\n", "index1/size": "266240K\n", "x86": "processor\t: 0\nmodel name\t: " +
			"A Chip\n\nprocessor\t: 1\nmodel name\t: B\n",
		"arm": "BogoMIPS : 50\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\nCPU part : 1\n"} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	caches := []string{"L1 48K", "L3 266240K"}
	require.Equal(t, Machine{runtime.GOARCH, "A Chip", caches},
		machineAt(filepath.Join(dir, "x86"), dir))
	require.Equal(t, Machine{runtime.GOARCH, "0x41 0xd40", caches},
		machineAt(filepath.Join(dir, "arm"), dir))
	require.Equal(t, Machine{runtime.GOARCH, "unknown processor", []string{}},
		machineAt(filepath.Join(dir, "none"), filepath.Join(dir, "none")))
}

// TestThresholdIsWhatWins: the smallest batch from which on all larger ones win.
func TestThresholdIsWhatWins(t *testing.T) {
	never := func() bool { return false }
	for _, c := range []struct {
		wins func(bytes uint64) bool
		want uint64
		why  string
	}{
		{func(n uint64) bool { return n >= 16<<20 }, 16 << 20, "as measured"},
		{func(n uint64) bool { return n >= 32<<20 || n == 2<<20 }, 32 << 20, "as measured"},
		{func(uint64) bool { return true }, tuneBytesMin, "as measured"},
		{func(uint64) bool { return false }, 2 * tuneBytesMax,
			"twice the 128 MiB at which it was no faster"},
	} {
		bytes, why := smallestThatWins(func(v Variant, n uint64) time.Duration {
			if v == AVX2Stream && c.wins(n) {
				return 10 * time.Millisecond
			}
			return 13 * time.Millisecond
		}, AVX2Stream, never)
		require.Equal(t, c.want, bytes)
		require.Equal(t, c.why, why)
	}
}

func TestTune(t *testing.T) {
	c, err := Tune(t.Context())
	require.NoError(t, err)
	t.Log(c.Why)
	p := untouched()
	require.NoError(t, p.configure(written(t, tunedText(t, c, nil)), ThisMachine))
	require.Equal(t, c.Way, p.chosen().Way)
	require.Equal(t, c.From, p.chosen().From)

	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err = Tune(ctx)
	require.ErrorIs(t, err, cause)
}
