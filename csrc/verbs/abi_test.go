// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// skipWithoutVerbsHeaders skips where libibverbs-dev is missing.
func skipWithoutVerbsHeaders(t *testing.T) {
	t.Helper()
	cmd := exec.Command("gcc", "-E", "-x", "c", "-")
	cmd.Stdin = strings.NewReader("#include <infiniband/verbs.h>\n")
	if err := cmd.Run(); err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{
			Backend: "rdma", Reason: "no headers to compare with",
			Fix: "apt-get install libibverbs-dev"})
	}
}

func TestDeclarationsAreThoseOfVerbs(t *testing.T) {
	skipWithoutVerbsHeaders(t)
	ours := standin.Facts(t, "testdata/facts.c", "-std=c11", "-Werror")
	theirs := standin.Facts(t, "testdata/facts.c", "-std=gnu11", "-DREAL")
	if len(ours) < 300 || len(ours) != len(theirs) {
		t.Fatalf("%d facts of ours, %d of libibverbs' headers", len(ours), len(theirs))
	}
	for name, value := range ours {
		if theirs[name] != value {
			t.Errorf("%s: %s here, %s in libibverbs' headers", name, value, theirs[name])
		}
	}
}

// What the headers declare and the facts do not name would be believed unproved.
func TestEveryDeclarationOfVerbsIsProved(t *testing.T) {
	proof, err := os.ReadFile("testdata/facts.c")
	require.NoError(t, err)
	var text string
	for _, name := range []string{"abi.h", "abi_device.h"} {
		part, err := os.ReadFile(name)
		require.NoError(t, err)
		text += regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(string(part), "")
	}
	checked := 0
	mention := func(what string) {
		checked++
		if !strings.Contains(string(proof), what) {
			t.Errorf("%s is declared, and testdata/facts.c does not compare it", what)
		}
	}
	for _, name := range regexp.MustCompile(`\bIBV_[A-Z0-9_]+`).FindAllString(text, -1) {
		mention("VALUE(" + name + ")")
	}
	member := regexp.MustCompile(`(?:\(\*(\w+)\)\(.*\)|\b(\w+)(?:\[.*\])?);`)
	for _, m := range regexp.MustCompile(`(?sm)^(struct|union) (\w+) \{\n(.*?)^\}`).
		FindAllStringSubmatch(text, -1) {
		mention("SIZE(" + m[1] + " " + m[2] + ")")
		for _, f := range member.FindAllStringSubmatch(m[3], -1) {
			if f[2] == "wr" || !strings.Contains(string(proof), "."+f[1]+f[2]+")") {
				mention("FIELD(" + m[1] + " " + m[2] + ", " + f[1] + f[2] + ")")
			}
			checked++
		}
	}
	if checked < 300 {
		t.Errorf("only %d names found: has the style of the headers changed?", checked)
	}
}
