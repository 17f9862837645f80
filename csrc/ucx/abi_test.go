// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// skipWithoutHeaders skips where libucx-dev is missing, and returns the minor
// version of what is there.
func skipWithoutHeaders(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("gcc", "-E", "-P", "-x", "c", "-")
	cmd.Stdin = strings.NewReader("#include <ucp/api/ucp_version.h>\nminor=UCP_API_MINOR\n")
	out, err := cmd.Output()
	if err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{
			Backend: "ucx", Reason: "no headers to compare with",
			Fix: "apt-get install libucx-dev"})
	}
	var minor int
	_, text, _ := strings.Cut(string(out), "minor=")
	if _, err := fmt.Sscan(text, &minor); err != nil {
		t.Fatalf("read UCP_API_MINOR from %q: %v", out, err)
	}
	return minor
}

func TestDeclarationsAreThoseOfUCX(t *testing.T) {
	minor := skipWithoutHeaders(t)
	ours := standin.Facts(t, "testdata/facts.c", "-std=c11", "-Werror")
	theirs := standin.Facts(t, "testdata/facts.c", "-std=gnu11", "-DREAL")
	if len(ours) < 90 || len(ours) != len(theirs) {
		t.Fatalf("%d facts of ours, %d of UCX's headers", len(ours), len(theirs))
	}
	for name, value := range ours {
		if theirs[name] == value {
			continue
		}
		mine, _ := strconv.Atoi(value)
		his, _ := strconv.Atoi(theirs[name])
		if strings.HasPrefix(name, "sizeof ucp_") && minor > 13 && his > mine {
			continue // later versions add fields at the end
		}
		t.Errorf("%s: %s here, %s in UCX's headers", name, value, theirs[name])
	}
}

// What abi.h declares and the facts do not name would be believed unproved.
func TestEveryDeclarationIsProved(t *testing.T) {
	abi, err := os.ReadFile("abi.h")
	require.NoError(t, err)
	proof, err := os.ReadFile("testdata/facts.c")
	require.NoError(t, err)
	text := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(string(abi), "")
	checked := 0
	mention := func(name string) {
		checked++
		if !regexp.MustCompile(`\b` + regexp.QuoteMeta(name) + `\b`).Match(proof) {
			t.Errorf("abi.h declares %s, and testdata/facts.c does not compare it", name)
		}
	}
	for _, name := range regexp.MustCompile(`\bUC[SP]_[A-Z0-9_]+`).FindAllString(text, -1) {
		mention(name)
	}
	member := regexp.MustCompile(`(?m)^\t+[\w *]*?(?:\(\*(\w+)\)\(.*\)|\b(\w+)(?:\[.*\])?);$`)
	for _, body := range regexp.MustCompile(`(?s)typedef struct \{\n(.*?)\n\} (\w+);`).
		FindAllStringSubmatch(text, -1) {
		mention("SIZE(" + body[2])
		for _, f := range member.FindAllStringSubmatch(body[1], -1) {
			mention(f[1] + f[2])
		}
	}
	if checked < 90 {
		t.Errorf("only %d names found in abi.h: has its style changed?", checked)
	}
}
