// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Compile runs the C compiler. If that fails, the test fails with the compiler's output.
func Compile(t testing.TB, args ...string) {
	t.Helper()
	out, err := exec.Command("gcc", args...).CombinedOutput()
	require.NoError(t, err, "gcc %s\n%s", strings.Join(args, " "), out)
}

// Shared compiles C source text into a shared library with a file name such as "libcuda-fake.so.1",
// and returns its path.
func Shared(t testing.TB, name, text string) string {
	t.Helper()
	dir := t.TempDir()
	source, object := filepath.Join(dir, "fake.c"), filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(source, []byte(text), 0o600))
	Compile(t, "-shared", "-fPIC", "-o", object, source)
	return object
}

// Calls returns the names of the C functions that a macro of calls.h in the package's folder lists,
// given the parameters of that macro's argument, such as "name, args".
func Calls(t testing.TB, macro, parameters string) (names []string) {
	t.Helper()
	cmd := exec.Command("gcc", "-E", "-P", "-x", "c", "-")
	cmd.Stdin = strings.NewReader("#include \"calls.h\"\n#define X(" + parameters + ") @name\n" +
		macro + "(X)\n")
	out, err := cmd.Output()
	require.NoError(t, err)
	for _, m := range regexp.MustCompile(`@ ?(\w+)`).FindAllStringSubmatch(string(out), -1) {
		names = append(names, m[1])
	}
	return names
}

// HasHeader reports whether the compiler finds a header of the system.
func HasHeader(name string) bool {
	cmd := exec.Command("gcc", "-E", "-P", "-x", "c", "-")
	cmd.Stdin = strings.NewReader("#include <" + name + ">\n")
	return cmd.Run() == nil
}

// Facts compiles and runs a C program that prints sizes, offsets and constants of C declarations,
// one a line, as "name = value" or "name at value". It returns the values by name. Tests compare
// the facts of this module's own declarations with those of the system's headers.
func Facts(t testing.TB, source string, args ...string) map[string]string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "facts")
	Compile(t, append(args, "-Wall", "-Wextra", "-I.", "-o", exe, source)...)
	out, err := exec.Command(exe).Output()
	require.NoError(t, err)
	all := map[string]string{}
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		name, value, ok := strings.Cut(lines.Text(), " = ")
		if !ok {
			name, value, _ = strings.Cut(lines.Text(), " at ")
		}
		all[name] = value
	}
	return all
}
