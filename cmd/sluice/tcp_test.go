// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// certificates makes an authority and a member, whose certificate is valid for that long. It
// returns a backend that takes them, and the file of the key.
func certificates(t *testing.T, valid time.Duration) (backend, key string) {
	t.Helper()
	dir := t.TempDir()
	a, ours, err := testkit.NewAuthority("ours", 1000*time.Hour)
	require.NoError(t, err)
	ca, _, err := ours.Store(dir, "ca")
	require.NoError(t, err)
	pair, _, err := a.Issue(testkit.Member{Name: "node", Hosts: []string{"127.0.0.1"},
		Valid: valid})
	require.NoError(t, err)
	cert, key, err := pair.Store(dir, "node")
	require.NoError(t, err)
	return "tcp:certificate=" + cert + ",key=" + key + ",authority=" + ca, key
}

// TestDoctorLooksAtCertificates: doctor says whose they are, and what is wrong with them.
func TestDoctorLooksAtCertificates(t *testing.T) {
	backend, key := certificates(t, 999*time.Hour)
	o := ok(t, sluice(t, "doctor", "--backend", backend))
	require.Contains(t, o.stdout, `of "node", by "ours", for 127.0.0.1`)
	require.NotContains(t, o.stdout, "ends soon")
	require.NoError(t, os.Chmod(key, 0o644))
	o = ok(t, sluice(t, "doctor", "--backend", backend))
	require.Contains(t, o.stdout, "chmod 600 "+key)
	backend, _ = certificates(t, 24*time.Hour)
	o = ok(t, sluice(t, "doctor", "--backend", backend))
	require.Contains(t, o.stdout, "ends soon")
}

func TestReplayOverTCP(t *testing.T) {
	secure, _ := certificates(t, time.Hour)
	for name, args := range map[string][]string{
		"plain":  {"tcp:conns=2"},
		"secure": {secure + ",listen=127.0.0.1:0"},
		"own":    {"tcp:listen=127.0.0.1:0"},
		"aborts": {"tcp", "--abort-rate", "0.4"},
	} {
		t.Run(name, func(t *testing.T) {
			r := replayReport(t, append([]string{"--trace", smallTrace(t, 10), "--backend"},
				args...)...)
			if r["route"] != "tcp" || r["mismatches"] != 0.0 || r["leaked"] != 0.0 ||
				r["bytes"].(float64) == 0 {
				t.Errorf("%v", r)
			}
		})
	}
}

func TestDoctorSaysWhoCanReadTCP(t *testing.T) {
	secure, _ := certificates(t, time.Hour)
	for want, backend := range map[string]string{
		"this host alone":                         "tcp",
		"everybody on the network":                "tcp:listen=127.0.0.1:0,plaintext=true",
		"TLS 1.3 by a key of its own":             "tcp:listen=127.0.0.1:0",
		"TLS 1.3 with certificates of both sides": secure,
	} {
		o := sluice(t, "doctor", "--backend", backend)
		if o.status != 0 || !strings.Contains(o.stdout, "tcp-privacy") ||
			!strings.Contains(o.stdout, want) {
			t.Errorf("%s: no %q in %+v", backend, want, o)
		}
	}
}
