// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/copy"
)

// copying runs a command with that host copy.
func copying(t *testing.T, how string, args ...string) outcome {
	t.Helper()
	c, stdout, stderr := command(t, args...)
	c.Env = append(c.Env, copyVariable+"="+how)
	err := c.Run()
	return outcome{status(t, err), stdout.String(), withoutProgress(stderr)}
}

// TestDoctorTunes: what it writes is what the tool then copies by, in each process.
func TestDoctorTunes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "copy.json")
	o := ok(t, sluice(t, "doctor", "--tune", file))
	require.Contains(t, o.stdout, copyVariable+"="+file+", or HostCopy of a Config\n")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var tuned copy.Tuned
	require.NoError(t, json.Unmarshal(text, &tuned))
	require.Contains(t, o.stdout, "host-copy: "+tuned.Why)
	require.Contains(t, ok(t, copying(t, file, "doctor")).stdout, tuned.Why+"; measured ")
	shm := []string{"bench", "--backend", "shm", "--seconds", "0.01", "--size", "64"}
	ok(t, copying(t, file, shm...))

	tuned.Machine.CPU = "Z80"
	text, err = json.Marshal(tuned)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, text, 0o644))
	o = copying(t, file, shm...)
	require.Equal(t, statusFailed, o.status)
	require.Regexp(t, copyVariable+": host copy: "+file+" was measured on another machine "+
		`\(Z80, .*: run sluice doctor --tune here, or unset `+copyVariable+`\n$`, o.stderr)
	o = ok(t, copying(t, file, "doctor"))
	require.Regexp(t, `\nhost-copy +missing +.*doctor --tune here\n`, o.stdout)
	require.Contains(t, o.stdout, "sluice doctor --tune FILE and "+copyVariable+"=./FILE, or unset")
}

func TestBusyNote(t *testing.T) {
	require.Equal(t, "others use this machine (load 1.50 on 2 CPUs), and caches with it: measure "+
		"again when it is idle", busyNote("1.50 0.10 0.10 1/100 7\n", 2))
	require.Empty(t, busyNote("1.50 0.10 0.10 1/100 7\n", 4))
	require.Empty(t, busyNote("", 4))
}

// TestHostCopyByName: of a variant; a command that copies nothing does not care.
func TestHostCopyByName(t *testing.T) {
	plain := copy.Variants()[0].String()
	require.Contains(t, ok(t, copying(t, plain, "doctor")).stdout, plain+", as configured")
	o := copying(t, "quick", "bench")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, copyVariable+`: copy by "quick": this machine has `+plain)
	for path, why := range map[string]string{
		"/no/where":  "open /no/where: no such file or directory: name a file",
		os.TempDir(): os.TempDir() + " is no file: name one",
	} {
		require.Equal(t, outcome{statusFailed, "", "sluice bench: " + copyVariable +
			": host copy: " + why + " that sluice doctor --tune wrote, or unset " + copyVariable +
			"\n"}, copying(t, path, "bench"))
	}
	ok(t, copying(t, "quick", "version"))
	ok(t, copying(t, "quick", "bench", "--help"))
}

func TestDoctorTuneThatFails(t *testing.T) {
	for want, args := range map[string][]string{
		"--tune: open /no/where/.copy.json.": {"doctor", "--tune", "/no/where/copy.json"},
		"--tune is empty":                    {"doctor", "--tune", ""},
		"--backend":                          {"doctor", "--tune", "copy.json", "--backend", "shm"},
	} {
		o := sluice(t, args...)
		require.Equal(t, statusUsage, o.status, "%+v", o)
		require.Contains(t, o.stderr, want)
	}
}
