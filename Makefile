# Two commands: `make demo` and `make check`. Both install what is missing (and say what), then build with CMake and Ninja.
PRESET ?= release
BUILD = build/$(PRESET)

.PHONY: demo check build install clean

demo: build
	@packaging/demo.sh $(BUILD)

check:
	@packaging/install-missing.sh check
	@cmake --preset $(PRESET) -DTELPHER_TESTS=ON >/dev/null
	@cmake --build --preset $(PRESET)
	@packaging/check.sh $(PRESET)

build:
	@packaging/install-missing.sh build
	@cmake --preset $(PRESET) -DTELPHER_TESTS=OFF >/dev/null
	@cmake --build --preset $(PRESET)

install: build
	@cmake --install $(BUILD)

clean:
	rm -rf build
